"""Follows the calls of all modules while some steps are measured."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks.call_context import torch_variable
from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.module_tree import unwrapped_class
from comgra_decl.hooks.names import Names
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.probing.seclusion import SECLUDED, is_secluded
from comgra_decl.hooks.recursion import Headroom
from comgra_decl.torch_private import tracing_state

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from comgra_decl.hooks.place import ProgramPlace

State = TypeVar("State")


class _Known(NamedTuple):
    module: weakref.ref[nn.Module]
    outermost: weakref.ref[nn.Module]
    class_name: str


class Call(NamedTuple):
    """The beginning of a module call.

    Attributes:
        number: the module's number.
        gradients: whether gradients are enabled.
        inputs: the positional and the keyword arguments; without the latter unless they are read.
    """

    number: int
    gradients: bool
    inputs: Any


class ModuleCalls(Generic[State]):
    """Calls a function at the beginning and at the end of each module call, while installed.

    Args:
        enter: called at the beginning of a call; returns a state.
        leave: called with this state at the end of the call, even if it failed.
        on_fault: called with an error in tracing itself.
        keywords: whether to read the keyword arguments of calls, which takes a microsecond.
    """

    def __init__(
        self,
        enter: Callable[[Call], State],
        leave: Callable[[State], None],
        *,
        on_fault: Callable[[BaseException], None],
        keywords: bool = False,
    ) -> None:
        self._keywords = keywords
        self._enter = enter
        self._leave = leave
        self._on_fault = on_fault
        self._headroom = Headroom()
        self._numbering = Lock()
        self._handles: list[RemovableHandle] = []
        self._numbers: dict[int, int] = {}  # by the id of a module
        self._known: list[_Known] = []
        self._running: dict[int, list[tuple[nn.Module, State]]] = {}  # by thread

    def install(self) -> None:
        """Begin to follow calls."""
        self._headroom.take()
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Stop following calls. Idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if handles:
            self._headroom.give_back()
        self._running.clear()

    def names(self, place: ProgramPlace) -> list[str]:
        """Return the node of each module, by its number."""
        names = Names(place.naming)
        found = []
        for known in self._known:
            module, outermost = known.module(), known.outermost()
            alive = module is not None and outermost is not None
            found.append(names.module(module, within=outermost) if alive else known.class_name)  # type: ignore[arg-type]
        return found

    def outermost(self) -> list[nn.Module]:
        """Return the outermost modules that were called and still exist."""
        found = {id(top): top for known in self._known if (top := known.outermost()) is not None}
        return [*found.values()]

    @guarded
    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or tracing_state() is not None:
            return
        if SECLUDED and is_secluded():  # a probe calls a copy of the model
            return
        running = self._running.setdefault(this_thread.number, [])
        number = self._number(module, running[0][0] if running else module)
        inputs = args
        if self._keywords:
            # A global pre-hook receives no keyword arguments, but the frame that calls `guarded`'s
            # wrapper has them.
            inputs = args, torch_variable(sys._getframe(2), "kwargs")
        running.append((module, self._enter(Call(number, torch.is_grad_enabled(), inputs))))

    def _number(self, module: nn.Module, outermost: nn.Module) -> int:
        number = self._numbers.get(id(module))
        if number is not None and self._known[number].module() is module:
            return number
        known = _Known(weakref.ref(module), weakref.ref(outermost), unwrapped_class(module))
        with self._numbering:  # several threads may call models
            number = len(self._known)
            self._known.append(known)
            self._numbers[id(module)] = number
        return number

    @guarded
    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        running = self._running.get(this_thread.number, [])
        if not any(called is module for called, _ in running):
            return
        while running:  # a call whose hooks did not run because it failed is left as well
            called, state = running.pop()
            self._leave(state)
            if called is module:
                break
        if not running:
            self._running.pop(this_thread.number, None)
