"""The two functions of torch that have no hook of their own, wrapped while we need them.

Each wrapper calls the original first or last and changes neither arguments nor result; `restore`
puts the original back unless somebody else has wrapped it since.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comgra_decl.hooks.nested import tensors_in


class Patch:
    """Replaces one attribute of a module or class by a wrapper around it."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._wrap = wrap
        self._original: Any = None
        self._wrapper: Any = None

    def apply(self) -> None:
        """Puts the wrapper in place; calling it twice is harmless."""
        if self._wrapper is None:
            self._original = getattr(self._owner, self._name)
            self._wrapper = functools.wraps(self._original)(self._wrap(self._original))
            setattr(self._owner, self._name, self._wrapper)

    def restore(self) -> None:
        """Puts the original back."""
        if self._wrapper is not None and getattr(self._owner, self._name) is self._wrapper:
            setattr(self._owner, self._name, self._original)
        self._wrapper = None


class Backwards(threading.local):
    """Whether this thread is in a `backward()`: function modes make one call of it several."""

    inside = False


class LossWatch:
    """Tells `on_loss` (loss, tensor) about every tensor `backward()` is called on, before it runs.

    `Tensor.backward` looks `torch.autograd.backward` up at each call, so one wrapper sees both.
    Under mixed precision that tensor is the loss times the gradient scale; the loss itself is
    what the program handed to `GradScaler.scale`.
    """

    def __init__(
        self,
        on_loss: Callable[[torch.Tensor, torch.Tensor], None],
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_loss = on_loss
        self._on_done = on_done  # called when that `backward()` has ended, however it did
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._thread = Backwards()
        self._patches = (
            Patch(torch.autograd, "backward", self._wrap_backward),
            Patch(torch.amp.GradScaler, "scale", self._wrap_scale),
        )

    def apply(self) -> None:
        """Starts watching; calling it twice is harmless."""
        for patch in self._patches:
            patch.apply()

    def restore(self) -> None:
        """Stops watching and lets go of the last loss."""
        for patch in self._patches:
            patch.restore()
        self._scaled = None

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._thread.inside or torch._C._current_graph_task_id() != -1:
                return original(*args, **kwargs)
            self._tell(args[0] if args else kwargs.get("tensors"))
            self._thread.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._thread.inside = False
                self._on_done()

        return backward

    def _tell(self, tensors: Any) -> None:
        scaled, self._scaled = self._scaled, None
        for _, tensor in tensors_in(tensors):
            known = scaled is not None and scaled[0] is tensor
            self._on_loss(scaled[1] if scaled is not None and known else tensor, tensor)

    def _wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self._scaled = (result, outputs)
            return result

        return scale


def watch_mode(on_mode: Callable[[nn.Module, bool], None]) -> Patch:
    """Tells `on_mode` each module that is switched to training or evaluation, afterwards.

    `eval()` is `train(False)`. This is what makes evaluation visible at no cost: between recorded
    steps nothing is attached to any module, and a program switches once per evaluation phase, not
    once per batch.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(self: nn.Module, mode: bool = True) -> Any:
            result = original(self, mode)
            on_mode(self, mode)
            return result

        return train

    return Patch(nn.Module, "train", wrap)
