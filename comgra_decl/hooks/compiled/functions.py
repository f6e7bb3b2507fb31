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
    """The models that compiled functions call, as seen in steps recorded eagerly.

    Python code cannot observe the calls that a compiled function makes, so the models that need
    observers must be known before it is called.

    Args:
        warn: called with a warning if a function has to run eagerly.

    Attributes:
        call_forward: whether a compiled function calls a model's `forward` directly, in which case
            torch runs no hooks.
    """

    def __init__(self, *, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._outermost: dict[object, dict[int, weakref.ref[nn.Module]]] = {}  # by function
        self._whole: set[object] = set()  # functions that run backward or an optimizer too
        self.call_forward = False

    def calls(self, module: nn.Module, frame: FrameType | None) -> None:
        """Register an outermost module called eagerly from within `frame`."""
        for function in _around(frame):
            module = getattr(module, "_orig_mod", module)  # compiled inside a compiled function
            called = self._outermost.setdefault(function, {})
            called[id(module)] = weakref.ref(module)

    def ends(self, frame: FrameType | None) -> None:
        """Register a `backward` or optimizer step called eagerly from within `frame`."""
        self._whole.update(_around(frame))

    def calls_forward(self, frame: FrameType | None) -> None:
        """Register a direct eager call to an outermost module's `forward`."""
        self.call_forward = self.call_forward or any(True for _ in _around(frame))

    def outermost(self, caller: FrameType) -> list[nn.Module]:
        """Return the modules called by a compiled function that is about to run.

        Args:
            caller: the frame of the compiled callable. Empty if the function has never run eagerly.
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
    """Return the identity of a compiled function: its code object.

    A program may compile a new method or closure object in each step.
    """
    called: Any = inspect.unwrap(torch_variable(caller, "fn"))
    return getattr(called, "__code__", type(called))
