"""Read tensors that are not outputs of a module into slots, together with their gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.hooks.tensors.gradients import WITHOUT_BACKWARD, gradient_slot, unused
from comgra_decl.hooks.tensors.splitting import Part, take_apart
from comgra_decl.torch_private import is_functorch_wrapped

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.compiled.borders import InnerGradients
    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.slots import Slot
    from comgra_decl.spec import Capture


class _Hook(partial[None]):
    """A tensor hook for which torch issues no warning when a program saves the tensor.

    A class attribute, because `unserializable_hook` would allocate a dict for each hook.
    """

    __torch_unserializable__ = True


def _reshaped(
    reshape: Callable[[torch.Tensor], torch.Tensor],
    hook: Callable[[torch.Tensor | None], None],
    gradient: torch.Tensor | None,
) -> None:
    """Call a hook with the gradient in the shape in which it is recorded."""
    hook(None if gradient is None else reshape(gradient))


def _register(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook as `tensor.register_hook` does, without a handle to remove it.

    This takes a third of the time, for each output of each module. The hook lives as long as the
    tensor, which the step creates. Its key, unlike those of the program's hooks, is not a number.
    """
    function = gradient_function(tensor)
    if function is None or type(tensor) is not torch.Tensor:
        tensor.register_hook(hook)
        return
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        function._register_hook_dict(tensor)
    hooks[hook] = hook


SlotOf = Callable[[str], "Slot"]
"""Returns the slot of a role, for one node and iteration."""


Reshape = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor or its gradient, without history, in the shape in which it is recorded."""


class Wanted(NamedTuple):
    """What to read from a tensor: its value, its gradient, or both."""

    tensor: bool
    gradient: bool


class TensorRecorder:
    """Reads tensors immediately, and their gradients when backward reaches them.

    Args:
        on_fault: called with an exception raised by tracing in backward, which never reaches the
            program.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._leaf_hooks: dict[int, list[RemovableHandle]] = {}
        self._reached: set[int] = set()  # leaves that a gradient has reached
        self.inner: InnerGradients | None = None
        """Gradients of compiled code; autograd outside that code sees only part of each
        gradient."""

    def release(self) -> None:
        """Remove the hooks of leaves, because leaves outlive the step; other tensors do not."""
        for leaf in [*self._leaf_hooks]:
            self._release_leaf(leaf)

    def _release_leaf(self, leaf: int) -> None:
        for handle in self._leaf_hooks.pop(leaf, ()):
            handle.remove()
        self._reached.discard(leaf)

    def read(
        self,
        tensor: torch.Tensor,
        role: str,
        slot_of: SlotOf,
        *,
        capture: StepCapture,
        how: Capture,
        wanted: Wanted,
        graph: Provenance | None = None,
        inputs: Iterable[torch.Tensor] = (),
        reshape: Reshape | None = None,
    ) -> None:
        """Read one tensor, and its parts if `how` splits it; register hooks for their gradients.

        Torch function modes must be off. The tensor is traced in `graph`. If its computation was
        not observed, `inputs` are used as its sources.
        """
        slot = slot_of(role)
        if capture.aside:
            slot = capture.in_pass(slot)
        shown = tensor if reshape is None else reshape(tensor)
        dim = capture.batch_dim(shown, how.batch_dim, slot)
        read = self.read_whole(
            slot, tensor, dim, capture=capture, how=how, wanted=wanted, graph=graph, inputs=inputs,
            reshape=reshape,
        )  # fmt: skip
        if read and how.split is not None:
            self.read_parts(
                tensor, role, slot_of, capture=capture, how=how, wanted=wanted, batch_dim=dim,
                reshape=reshape,
            )  # fmt: skip

    def read_whole(
        self,
        slot: Slot,
        tensor: torch.Tensor,
        batch_dim: int | None,
        *,
        capture: StepCapture,
        how: Capture,
        wanted: Wanted,
        graph: Provenance | None,
        inputs: Iterable[torch.Tensor],
        reshape: Reshape | None = None,
    ) -> bool:
        """Read one tensor into a slot as `read` does, but not its parts.

        Returns:
            Whether the tensor can be read.
        """
        if wanted.tensor:
            shown = tensor if reshape is None else reshape(tensor)
            if capture.add(slot, shown, batch_dim=batch_dim, values=how.values) is None:
                return False
        elif is_functorch_wrapped(tensor):
            return False
        if graph is not None:
            graph.trace(slot, tensor, inputs)
        if wanted.gradient and self._awaits(tensor):
            # same as `watch`, without the extra call for each output
            hook = _Hook(self._on_gradient, capture, capture.epoch, slot, how.values, batch_dim)
            self.hook(tensor, hook if reshape is None else _Hook(_reshaped, reshape, hook))
        return True

    def watch(
        self,
        slot: Slot,
        tensor: torch.Tensor,
        capture: StepCapture,
        *,
        batch_dim: int | None,
        values: bool,
    ) -> None:
        """Record every gradient that reaches `tensor` in this step, each as a separate pass."""
        hook = _Hook(self._on_gradient, capture, capture.epoch, slot, values, batch_dim)
        self.hook(tensor, hook)

    def read_parts(
        self,
        tensor: torch.Tensor,
        role: str,
        slot_of: SlotOf,
        *,
        capture: StepCapture,
        how: Capture,
        wanted: Wanted,
        batch_dim: int | None,
        reshape: Reshape | None = None,
    ) -> None:
        """Read only the parts that `how` splits a tensor into, and their gradients."""
        shown = tensor if reshape is None else reshape(tensor)
        parts = self._parts(shown, slot_of(role), capture, how, batch_dim)
        slots = [capture.in_pass(slot_of(f"{role}.{part.label}")) for part in parts]
        if wanted.tensor:
            for part, slot in zip(parts, slots, strict=True):
                capture.add(slot, part.tensor, batch_dim=part.batch_dim, values=how.values)
        if wanted.gradient and self._awaits(tensor) and parts:
            args = (capture, capture.epoch, slots, how, batch_dim)
            hook = partial(self._on_split_gradient, *args)
            self.hook(tensor, hook if reshape is None else partial(_reshaped, reshape, hook))

    def _parts(
        self,
        tensor: torch.Tensor,
        slot: Slot,
        capture: StepCapture,
        how: Capture,
        batch_dim: int | None,
    ) -> list[Part]:
        assert how.split is not None
        try:
            return take_apart(tensor, how.split, batch_dim=batch_dim)
        except ValueError as error:
            name = f"{slot.node()} {slot.role}, split by {how.split.name!r},"
            capture.refused[name] = str(error)
            return []

    def _awaits(self, tensor: torch.Tensor) -> bool:
        """Whether a gradient may reach a tensor; compiled code overrides this."""
        return tensor.requires_grad

    def hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Call `hook` with each gradient that reaches a tensor."""
        if self.inner is not None and self.inner.take(tensor, hook):
            return
        if type(hook) is not _Hook:
            hook = unserializable_hook(hook)  # else torch warns programs that save the tensor
        if not tensor.is_leaf:
            _register(tensor, hook)
            return
        leaf = id(tensor)
        if leaf in self._reached:  # reused as an input, such as an image being optimised
            self._release_leaf(leaf)
        handle = tensor.register_hook(unserializable_hook(partial(self._on_leaf, leaf, hook)))
        self._leaf_hooks.setdefault(leaf, []).append(handle)

    def _on_leaf(
        self,
        leaf: int,
        hook: Callable[[torch.Tensor], None],
        gradient: torch.Tensor,
    ) -> None:
        self._reached.add(leaf)
        hook(gradient)

    def _on_gradient(
        self,
        capture: StepCapture,
        epoch: int,
        slot: Slot,
        values: bool,
        batch_dim: int | None,
        gradient: torch.Tensor | None,
    ) -> None:
        if gradient is None or capture.epoch != epoch or not capture.open:
            return  # autograd passes None if a function has no gradient for this result
        try:
            pass_ = unused(capture, slot, capture.backwards.current or WITHOUT_BACKWARD)
            capture.add(pass_, gradient, batch_dim=batch_dim, values=values)
        except Exception as error:
            self._on_fault(error)

    @guarded
    def _on_split_gradient(
        self,
        capture: StepCapture,
        epoch: int,
        slots: list[Slot],
        how: Capture,
        batch_dim: int | None,
        gradient: torch.Tensor | None,
    ) -> None:
        if gradient is None or capture.epoch != epoch or not capture.open:
            return  # autograd passes None if a function has no gradient for this result
        assert how.split is not None
        parts = take_apart(gradient, how.split, batch_dim=batch_dim)
        for slot, part in zip(slots, parts, strict=True):
            pass_ = gradient_slot(capture, slot)
            capture.add(pass_, part.tensor, batch_dim=part.batch_dim, values=how.values)
