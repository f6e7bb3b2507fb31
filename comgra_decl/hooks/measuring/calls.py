"""Follows the calls of all modules while some steps are measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from comgra_decl.hooks.guarded import guarded
from comgra_decl.hooks.module_tree import unwrapped_class
from comgra_decl.hooks.names import Names
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


class ModuleCalls(Generic[State]):
    """Calls a function at the beginning and at the end of each module call, while installed.

    Args:
        enter: called with the module's number and whether gradients are enabled; returns a state.
        leave: called with this state at the end of the call, even if it failed.
        on_fault: called with an error in tracing itself.
        given: called with the module's number and its positional arguments, before `enter`.
    """

    def __init__(
        self,
        enter: Callable[[int, bool], State],
        leave: Callable[[State], None],
        *,
        on_fault: Callable[[BaseException], None],
        given: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._given = given
        self._enter = enter
        self._leave = leave
        self._on_fault = on_fault
        self._headroom = Headroom()
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
        running = self._running.setdefault(get_ident(), [])
        number = self._numbers.get(id(module))
        if number is None or self._known[number].module() is not module:
            number = self._numbers[id(module)] = len(self._known)
            outermost = running[0][0] if running else module
            self._known.append(
                _Known(weakref.ref(module), weakref.ref(outermost), unwrapped_class(module))
            )
        if self._given is not None:
            self._given(number, args)
        running.append((module, self._enter(number, torch.is_grad_enabled())))

    @guarded
    def _after(self, module: nn.Module, _args: Any, _output: Any) -> None:
        running = self._running.get(get_ident(), [])
        if not any(called is module for called, _ in running):
            return
        while running:  # a call whose hooks did not run because it failed is left as well
            called, state = running.pop()
            self._leave(state)
            if called is module:
                return
