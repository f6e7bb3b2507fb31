"""Insert torch function modes below all modes of the user, and remove them again.

Modes form a stack, but the user's own `with torch.device(...)` may be entered before ours and left
before it; popping by position would then remove the wrong mode. So our modes go to the bottom and
are removed by identity.

Each thread has its own stack. A mode removed by another thread than the one that inserted it stays
on the stack without effect, and is swept off when its thread is next seen.
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
    """The base class of tracing's own modes.

    Args:
        on_fault: called with errors of tracing itself.

    Attributes:
        thread: the thread whose calls it handles, 0 for none; it must do nothing in other threads.
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
        """Call the function once and return its result."""


_placed: WeakSet[OwnMode] = WeakSet()
"""Modes on the stack, or handling a call after which they return to it."""
_removed: WeakSet[OwnMode] = WeakSet()
_returning: WeakSet[OwnMode] = WeakSet()
"""Modes removed while handling a call: torch puts them back when that call returns."""


def insert_at_bottom(mode: OwnMode) -> None:
    """Make `mode` the outermost active torch function mode of this thread."""
    here = mode.thread == get_ident()
    at_work = here and (mode in _placed or mode in _returning) and not is_active(mode)
    mode.thread = get_ident()
    _removed.discard(mode)
    _returning.discard(mode)
    _placed.add(mode)
    if not at_work:  # otherwise torch puts it back
        _replace_all([mode, *(other for other in _all() if other is not mode)])


def remove(mode: OwnMode) -> None:
    """Remove `mode` from the stack; does nothing if it is not on it."""
    was_placed = is_placed(mode)
    _placed.discard(mode)
    _removed.add(mode)  # before anything else, so that `sweep` removes it if the rest fails
    if was_placed and not is_active(mode):
        _returning.add(mode)
    if mode.thread != get_ident():  # it stays on the stack of that thread until it is seen again
        mode.thread = 0
    _replace_all([other for other in _all() if other is not mode])


def sweep() -> None:
    """Remove modes that torch has put back after their removal.

    Torch takes a mode off the stack while it handles a call, and puts it back afterwards, even if
    the mode was removed during the call (by an optimizer that steps within `loss.backward()`).
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
    """Take our modes off the stack of this thread within a `with` block."""
    ours = [mode for mode in _all() if isinstance(mode, OwnMode)]
    if ours:
        _replace_all([mode for mode in _all() if mode not in ours])
    try:
        yield
    finally:
        for mode in ours:
            if _is_gone(mode):  # in the meantime
                _returning.discard(mode)
        back = [mode for mode in ours if not _is_gone(mode)]
        if back:
            _replace_all([*back, *(mode for mode in _all() if mode not in back)])


def at_work() -> bool:
    """Return whether one of our modes is handling a call, so that torch would put it back."""
    here = [mode for mode in (*_placed, *_returning) if mode.thread == get_ident()]
    return not all(is_active(mode) for mode in here)


def any_active() -> bool:
    """Return whether one of our modes is on the stack of this thread."""
    return any(isinstance(mode, OwnMode) for mode in _all())


def is_placed(mode: OwnMode) -> bool:
    """Return whether `mode` is on the stack, or handling a call after which it returns to it."""
    return mode in _placed and mode.thread == get_ident()


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether `mode` is on the stack."""
    return any(active is mode for active in _all())


def _all() -> list[TorchFunctionMode]:
    """Return the active modes, outermost first."""
    return [function_mode_at(i) for i in range(function_modes())]


def _replace_all(modes: list[TorchFunctionMode]) -> None:
    """Replace the stack with `modes`; no tensor code runs while the program's modes are off it."""
    for _ in range(function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
