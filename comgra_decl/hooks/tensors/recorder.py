"""Reads tensors and their gradients into slots, for whatever is not the output of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.hooks import unserializable_hook

from comgra_decl.hooks.guarded import guarded
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

SlotOf = Callable[[str], "Slot"]
"""Gives the slot of a role, of one node and iteration."""


class Wanted(NamedTuple):
    """What to read of a tensor: itself, its gradient."""

    tensor: bool
    gradient: bool


class TensorRecorder:
    """Reads tensors the moment they are shown, and their gradients when backward reaches them.

    Args:
        on_fault: called with an exception of our own in backward; the program never sees it.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        self._leaf_hooks: dict[int, list[RemovableHandle]] = {}
        self._reached: set[int] = set()  # leaves that a gradient has reached
        self.inner: InnerGradients | None = None
        """Gradients that compiled code computes and the autograd outside sees in part."""

    def release(self) -> None:
        """Takes the hooks off leaves, which outlive their step; those of others die with it."""
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
    ) -> None:
        """Reads one tensor, its parts if `how` splits it, and arranges for their gradients.

        Torch function modes must be off. `graph` is told of the tensor; `inputs` are what it was
        computed from, where nobody saw how.
        """
        slot = slot_of(role)
        if capture.aside:
            slot = capture.in_pass(slot)
        dim = capture.batch_dim(tensor, how.batch_dim, slot)
        if wanted.tensor:
            if capture.add(slot, tensor, batch_dim=dim, values=how.values) is None:
                return
        elif is_functorch_wrapped(tensor):
            return
        if graph is not None:
            graph.trace(slot, tensor, inputs)
        if wanted.gradient and self._awaits(tensor):
            # what `watch` does, with a call less for each output
            self.hook(
                tensor,
                partial(self._on_gradient, capture, capture.epoch, slot, how.values, dim),
            )
        if how.split is not None:
            self.read_parts(
                tensor, role, slot_of, capture=capture, how=how, wanted=wanted, batch_dim=dim
            )

    def watch(
        self,
        slot: Slot,
        tensor: torch.Tensor,
        capture: StepCapture,
        *,
        batch_dim: int | None,
        values: bool,
    ) -> None:
        """Records every gradient that reaches `tensor` in this step, each as a pass of its own."""
        hook = partial(self._on_gradient, capture, capture.epoch, slot, values, batch_dim)
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
    ) -> None:
        """Reads only the parts that `how` splits a tensor into, and their gradients."""
        parts = self._parts(tensor, slot_of(role), capture, how, batch_dim)
        slots = [capture.in_pass(slot_of(f"{role}.{part.label}")) for part in parts]
        if wanted.tensor:
            for part, slot in zip(parts, slots, strict=True):
                capture.add(slot, part.tensor, batch_dim=part.batch_dim, values=how.values)
        if wanted.gradient and self._awaits(tensor) and parts:
            args = (capture, capture.epoch, slots, how, batch_dim)
            self.hook(tensor, partial(self._on_split_gradient, *args))

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
            name = f"{slot.node()} {slot.role}, taken apart by {how.split.name!r},"
            capture.refused[name] = str(error)
            return []

    def _awaits(self, tensor: torch.Tensor) -> bool:
        """Whether a gradient may reach a tensor; that of compiled code is known in another way."""
        return tensor.requires_grad

    def hook(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Hands on the gradients that reach a tensor."""
        if self.inner is not None and self.inner.take(tensor, hook):
            return
        hook = unserializable_hook(hook)  # else torch warns a program that saves the tensor
        if not tensor.is_leaf:
            tensor.register_hook(hook)
            return
        leaf = id(tensor)
        if leaf in self._reached:  # it is given anew: an image that is trained, in each iteration
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
            return  # autograd hands over None where a function has no gradient for this result
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
            return  # autograd hands over None where a function has no gradient for this result
        assert how.split is not None
        parts = take_apart(gradient, how.split, batch_dim=batch_dim)
        for slot, part in zip(slots, parts, strict=True):
            pass_ = gradient_slot(capture, slot)
            capture.add(pass_, part.tensor, batch_dim=part.batch_dim, values=how.values)
