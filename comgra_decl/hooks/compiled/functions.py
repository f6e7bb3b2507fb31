"""Compiled functions of the program that call its models."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.call_context import is_compiled_call, is_module_call, torch_variable

if TYPE_CHECKING:
    from torch import nn

_WHOLE = (
    "a compiled function calls the model and also runs backward or an optimizer. In recorded steps "
    "it runs eagerly, because hooks cannot observe backward or an optimizer inside compiled code. "
    "To record compiled code, compile only the forward pass or the model"
)


class CompiledFunctions:
    """What is called within them, as far as records made eagerly have shown it.

    Python sees nothing of what a compiled function calls. So which models have to show their
    tensors there must be known before it is called.

    Args:
        warn: told what runs eagerly all the same.

    Attributes:
        call_forward: whether one calls `forward` of a model, for which torch runs no hooks.
    """

    def __init__(self, *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._outermost: dict[object, dict[int, weakref.ref[nn.Module]]] = {}  # by function
        self._whole: set[object] = set()  # those that do what only hooks can read
        self.call_forward = False

    def calls(self, module: nn.Module, frame: FrameType | None) -> None:
        """An outermost module is called, eagerly, from within `frame`."""
        for function in _around(frame):
            module = getattr(module, "_orig_mod", module)  # compiled within what is compiled
            called = self._outermost.setdefault(function, {})
            called[id(module)] = weakref.ref(module)

    def ends(self, frame: FrameType | None) -> None:
        """`backward` or the step of an optimizer is called, eagerly, from within `frame`."""
        self._whole.update(_around(frame))

    def calls_forward(self, frame: FrameType | None) -> None:
        """The `forward` of an outermost module is called, eagerly, by no call of the module."""
        self.call_forward = self.call_forward or any(True for _ in _around(frame))

    def outermost(self, caller: FrameType) -> list[nn.Module]:
        """Returns the modules that a compiled function calls, which is about to begin.

        Args:
            caller: the compiled callable. None are known of one that nobody has seen run eagerly.
        """
        function = _function(caller)
        refs = self._outermost.get(function, {})
        if refs and function in self._whole:
            self._warn(_WHOLE)
            return []
        return [module for ref in refs.values() if (module := ref()) is not None]


def _around(frame: FrameType | None) -> Iterator[object]:
    while frame is not None:
        if is_compiled_call(frame) and not is_module_call(frame):
            yield _function(frame)
        frame = frame.f_back


def _function(caller: FrameType) -> object:
    """Returns what a compiled function is known by: its code.

    A program may compile a method, or a closure, anew in each step.
    """
    called: Any = inspect.unwrap(torch_variable(caller, "fn"))
    return getattr(called, "__code__", type(called))
