"""Functions that have no hook of their own, wrapped while we need them.

A wrapper calls the original once and changes neither arguments nor result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comgra_decl.hooks.compiled import run_natively

_ABSENT = object()
_is_compiling = torch.compiler.is_compiling


class Patch:
    """Replaces one attribute of a module or class by a wrapper around it.

    Args:
        owner: the module or class.
        name: of the attribute, which a class may have inherited.
        wrap: given the attribute as it is stored (a `classmethod` still is one), returns what is to
            stand in its place.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._wrap = wrap
        self._before: Any = None
        self._wrapper: Any = None

    def apply(self) -> None:
        """Puts the wrapper in place; calling it twice is harmless."""
        if self._wrapper is None:
            self._before = vars(self._owner).get(self._name, _ABSENT)
            self._wrapper = self._wrap(self._stored())
            setattr(self._owner, self._name, self._wrapper)

    def restore(self) -> None:
        """Puts back what was there, unless somebody else has replaced it since."""
        ours = self._wrapper is not None and vars(self._owner).get(self._name) is self._wrapper
        if ours and self._before is _ABSENT:
            delattr(self._owner, self._name)
        elif ours:
            setattr(self._owner, self._name, self._before)
        self._wrapper = None

    def _stored(self) -> Any:
        if self._before is not _ABSENT:
            return self._before
        inherited = inspect.getattr_static(self._owner, self._name, _ABSENT)
        return getattr(self._owner, self._name) if inherited is _ABSENT else inherited


def watch_mode(
    on_mode: Callable[[nn.Module, bool], None], *, on_fault: Callable[[BaseException], None]
) -> Patch:
    """Tells `on_mode` each module that is switched to training or evaluation, afterwards.

    `eval()` is `train(False)`. This is what makes evaluation visible at no cost: between recorded
    steps nothing is attached to any module, and a program switches once per evaluation phase, not
    once per batch.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train(self: nn.Module, mode: bool = True) -> Any:
            result = original(self, mode)
            if not _is_compiling():
                try:
                    on_mode(self, mode)
                except Exception as error:
                    on_fault(error)
            return result

        run_natively(train, within=False)
        return train

    return Patch(nn.Module, "train", wrap)
