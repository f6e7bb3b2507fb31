"""Functions of torch that have no hook of their own, wrapped while we need them.

Each wrapper calls the original first or last and changes neither arguments nor result; `restore`
puts the original back unless somebody else has wrapped it since.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


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
