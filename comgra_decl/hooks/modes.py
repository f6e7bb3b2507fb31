"""Placing a torch function mode below every mode of the user, and taking it out again.

Modes are a stack, but the user's own `with torch.device(...)` may be entered before ours and left
before it: popping by position would then remove the wrong mode. So ours goes to the bottom and is
removed by identity.

Each thread has a stack of its own. A mode is on that of the thread that has put it there; what
another thread takes off stays on that stack, does nothing there, and is swept off it when the
thread is next seen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakSet

from torch.overrides import TorchFunctionMode

from comgra_decl.hooks.originals import genuine
from comgra_decl.torch_private import (
    function_mode_at,
    function_modes,
    pop_function_mode,
    push_function_mode,
)


class OwnMode(TorchFunctionMode):
    """A mode of ours.

    Args:
        on_fault: told about an error of our own.

    Attributes:
        thread: the one whose calls it sees; it must do nothing in any other. 0: none.
    """

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_fault = on_fault
        self.thread = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            called = genuine(func)
        except Exception as error:
            self._on_fault(error)
            called = func
        return self.handle(called, args, kwargs or {})

    @abstractmethod
    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function once, and returns what it returns."""


_placed: WeakSet[OwnMode] = WeakSet()
"""What is on the stack, or will be when the call that it handles has returned."""
_removed: WeakSet[OwnMode] = WeakSet()
_returning: WeakSet[OwnMode] = WeakSet()
"""What was removed while it handled a call: torch puts it back when that call returns."""


def insert_at_bottom(mode: OwnMode) -> None:
    """Makes `mode` the outermost active torch function mode of this thread."""
    here = mode.thread == get_ident()
    at_work = here and (mode in _placed or mode in _returning) and not is_active(mode)
    mode.thread = get_ident()
    _removed.discard(mode)
    _returning.discard(mode)
    _placed.add(mode)
    if not at_work:  # else it comes back by itself
        _replace_all([mode, *(other for other in _all() if other is not mode)])


def remove(mode: OwnMode) -> None:
    """Removes `mode` wherever it is on the stack; does nothing if it is not there."""
    was_placed = is_placed(mode)
    _placed.discard(mode)
    _removed.add(mode)  # first of all: should the rest fail, `sweep` takes it off
    if was_placed and not is_active(mode):
        _returning.add(mode)
    if mode.thread != get_ident():  # it stays on the stack of that thread until it is seen again
        mode.thread = 0
    _replace_all([other for other in _all() if other is not mode])


def sweep() -> None:
    """Removes modes that have come back.

    Torch takes a mode off the stack while it handles a call, and puts it back afterwards. If it is
    removed within that call (an optimizer that steps within `loss.backward()`), it comes back.
    """
    if not function_modes():
        return
    found = _all()
    gone = [mode for mode in found if isinstance(mode, OwnMode) and _is_gone(mode)]
    if gone:
        _replace_all([mode for mode in found if mode not in gone])
        for mode in gone:
            if mode.thread == get_ident():
                _returning.discard(mode)


def _is_gone(mode: OwnMode) -> bool:
    return mode in _removed or mode.thread != get_ident()


@contextmanager
def aside() -> Iterator[None]:
    """Takes our modes off the stack of this thread for a while."""
    ours = [mode for mode in _all() if isinstance(mode, OwnMode)]
    if ours:
        _replace_all([mode for mode in _all() if mode not in ours])
    try:
        yield
    finally:
        for mode in ours:
            if _is_gone(mode):  # meanwhile
                _returning.discard(mode)
        back = [mode for mode in ours if not _is_gone(mode)]
        if back:
            _replace_all([*back, *(mode for mode in _all() if mode not in back)])


def at_work() -> bool:
    """Whether a mode of ours is handling a call: what is removed now comes back."""
    here = [mode for mode in (*_placed, *_returning) if mode.thread == get_ident()]
    return not all(is_active(mode) for mode in here)


def any_active() -> bool:
    """Whether a mode of ours is on the stack of this thread."""
    return any(isinstance(mode, OwnMode) for mode in _all())


def is_placed(mode: OwnMode) -> bool:
    """Whether `mode` is on the stack, or will be when the call that it handles has returned."""
    return mode in _placed and mode.thread == get_ident()


def is_active(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is anywhere on the stack."""
    return any(active is mode for active in _all())


def _all() -> list[TorchFunctionMode]:
    """Returns the active modes, outermost first."""
    return [function_mode_at(i) for i in range(function_modes())]


def _replace_all(modes: list[TorchFunctionMode]) -> None:
    """Makes `modes` the active ones: the program's are never off the stack while we compute."""
    for _ in range(function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
