"""Draw the first batches of a training script, as its model receives them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.query.batches import Array

if TYPE_CHECKING:
    import torch


@dataclass
class Drawn:
    """The batches that a script passes to its model.

    Attributes:
        tensors: the tensors of each batch, by label: the model's inputs, what a loss compares the
            output with, and other tensors of the DataLoader's batch.
        skipped: number of optimizer steps that were skipped to draw more batches.
        convolved: the labels of the tensors that the model passed to a convolution, which expects
            the channels after the samples.
    """

    tensors: dict[str, list[Array]] = field(default_factory=dict)
    skipped: int = 0
    convolved: set[str] = field(default_factory=set)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return max(map(len, self.tensors.values()), default=0)

    @property
    def target(self) -> str | None:
        """The label of the only target; None if there is none, or more than one."""
        found = [label for label in self.tensors if label.startswith("target")]
        return found[0] if len(found) == 1 else None


# -- drawing -----------------------------------------------------------------------------------


@contextmanager
def drawing(drawn: Drawn, batches: int, end: Callable[[], BaseException]) -> Iterator[None]:
    """Collect the model's inputs and targets, and raise `end()` at the first step with enough.

    At earlier optimizer steps, the gradients are dropped, so the parameters do not change.

    Args:
        drawn: filled with tensors.
        batches: number of batches to draw.
        end: creates the exception that ends the program.
    """
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import DataLoader

    from comgra_decl.hooks.patches import Patch

    watch = _Watch(drawn, batches, end)
    patch = Patch(DataLoader, "__iter__", watch.loaded)
    handles = [
        register_module_forward_pre_hook(watch.enter),
        register_module_forward_hook(watch.leave, always_call=True),
        register_optimizer_step_pre_hook(watch.step),
    ]
    patch.apply()
    try:
        with _losses(watch.compared):
            yield
    finally:
        patch.restore()
        for handle in handles:
            handle.remove()


def _losses(compared: Callable[[str, Any], None]) -> Any:
    """Return a mode that reports the target of each call of a loss function."""
    from comgra_decl.hooks.modes import CallWatch
    from comgra_decl.hooks.tensors.loss_calls import target_argument

    class Losses(CallWatch):
        def handle(
            self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            known = target_argument(func)
            if known is not None:
                name, at = known
                compared(func.__name__, kwargs.get(name, args[at] if at < len(args) else None))
            return func(*args, **kwargs)

    return Losses()


class _Watch:
    """Observes a program until enough batches are drawn."""

    def __init__(self, drawn: Drawn, batches: int, end: Callable[[], BaseException]) -> None:
        self._drawn, self._batches, self._end = drawn, batches, end
        self._depth = 0
        self._model: Any = None
        self._loaded: list[tuple[str, torch.Tensor]] = []
        self._done = 0

    def loaded(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Remember the tensors of a DataLoader's newest batch."""
        from comgra_decl.hooks.pytree import tensors_in

        for batch in original(loader):
            self._loaded = tensors_in(batch, "batch")
            yield batch

    def enter(self, module: Any, args: Any) -> None:
        """Collect the inputs of a call of the model in training."""
        import inspect

        import torch

        from comgra_decl.hooks.call_context import torch_variable
        from comgra_decl.hooks.module_tree import has_parameters

        self._depth += 1
        if self._depth > 1:
            self._note_convolution(module, args)
            return
        trains = module.training and torch.is_grad_enabled() and has_parameters(module)
        if not trains or self._model not in (None, module):
            return
        if self._done >= self._batches:
            return
        self._model = module
        self._done += 1
        frame = inspect.currentframe()  # a global hook is not given the keyword arguments
        caller = None if frame is None else frame.f_back
        kwargs = {} if caller is None else torch_variable(caller, "kwargs") or {}
        inputs = _inputs(module, args, kwargs)
        for label, tensor in inputs:
            self._keep(label, tensor)
        self._note_convolution(module, args)
        values = {_content(tensor) for _, tensor in inputs} if self._loaded else set()
        for path, tensor in self._loaded:
            if _content(tensor) not in values:
                self._keep(f"{path} (not passed to the model)", tensor)
        self._loaded = []

    def _note_convolution(self, module: Any, args: Any) -> None:
        """Note which input a convolution receives: the one with the shape of its argument."""
        from torch import nn

        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        if not isinstance(module, kinds) or not args or args[0].ndim != 4:
            return
        shape = tuple(args[0].shape)
        for label, batches in self._drawn.tensors.items():
            if batches and batches[-1].shape == shape and shape[1] == module.in_channels:
                self._drawn.convolved.add(label)

    def leave(self, *_: Any) -> None:
        """Handle the end of a module call."""
        self._depth -= 1

    def compared(self, function: str, target: Any) -> None:
        """Collect the target of a loss."""
        import torch

        label = f"target of {function}"
        known = len(self._drawn.tensors.get(label, ()))
        if isinstance(target, torch.Tensor) and known < self._done:
            same = _content(target)
            for other, batches in [*self._drawn.tensors.items()]:
                beside = other.endswith("(not passed to the model)")
                if beside and batches and _content_of(batches[-1]) == same:
                    batches.pop()  # now it is known what it is
                    if not batches:
                        del self._drawn.tensors[other]
            self._keep(label, target)

    def step(self, optimizer: Any, *_: Any) -> None:
        """End the program, or skip the step to draw another batch."""
        if self._done >= self._batches:
            raise self._end()
        self._drawn.skipped += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # the optimizers of torch skip such parameters

    def _keep(self, label: str, tensor: torch.Tensor) -> None:
        import torch

        from comgra_decl.stats.support import is_readable

        if not is_readable(tensor):
            return
        plain = tensor.detach().to("cpu", copy=True)
        if plain.dtype is torch.bfloat16:
            plain = plain.to(torch.float32)
        self._drawn.tensors.setdefault(label, []).append(plain.numpy())


def _inputs(module: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors passed to a module, named after the parameters of its `forward`."""
    import inspect

    from comgra_decl.hooks.pytree import tensors_in

    try:
        names = [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):
        names = []
    found = []
    for number, value in enumerate(args):
        name = names[number] if number < len(names) else str(number)
        found += tensors_in(value, f"input {name}")
    for name, value in kwargs.items():
        found += tensors_in(value, f"input {name}")
    return found


def _content(tensor: torch.Tensor) -> bytes:
    """Return a digest of the values of a tensor, on any device and of any dtype."""
    import torch

    plain = tensor.detach().cpu()
    plain = plain.to(torch.float32) if plain.dtype.is_floating_point else plain
    return _content_of(plain.numpy())


def _content_of(values: Array) -> bytes:
    kind = np.float32 if values.dtype.kind == "f" else values.dtype
    plain = np.ascontiguousarray(values, kind)
    return hashlib.sha256(repr(plain.shape).encode() + plain.tobytes()).digest()
