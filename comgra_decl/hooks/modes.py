"""Insert torch function modes below all of the program's modes, and remove them again.

Modes form a stack. The program may, however, enter its own `with torch.device(...)` before our mode
is inserted, and leave it while our mode is still active. Popping by position would then remove the
wrong mode. Our modes are therefore inserted at the bottom and removed by identity.

Each thread has its own stack. If a thread removes a mode that another thread inserted, the mode
remains on the other thread's stack, without effect, until `sweep` runs in that thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch.overrides import TorchFunctionMode

from comgra_decl.hooks.originals import genuine
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.torch_private import (
    function_mode_at,
    function_modes,
    pop_function_mode,
    push_function_mode,
)


class CallWatch(TorchFunctionMode):
    """The base class of modes that read the calls of functions.

    It calls the function that the program called, which is not the one that torch passes to a mode
    where the program, or tracing itself, has put another in its place.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.handle(genuine(func), args, kwargs or {})

    @abstractmethod
    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function once and return its result.

        Recognise functions of torch by `__name__`: what a module of torch holds under that name
        may be a replacement.
        """


class OwnMode(CallWatch):
    """The base class of the modes that stay active while the program runs.

    Args:
        on_fault: called with errors in tracing itself.

    Attributes:
        thread: the thread whose calls the mode handles, 0 for none; the mode has no effect in other
        threads.
        placed: whether it is on the stack, or handling a call after which torch puts it back.
        removed: whether it was removed and has not been inserted again.
        handling: the thread in which it is handling a call, 0 for none; torch takes it off the
            stack for that time.
    """

    def __init__(self, on_fault: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._on_fault = on_fault
        self.thread = 0
        # attributes rather than sets of modes: they change twice in each recorded step
        self.placed = False
        self.removed = False
        self.handling = 0
        _modes.add(self)

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
        before, self.handling = self.handling, this_thread.number
        try:
            return self.handle(called, args, kwargs or {})
        finally:
            self.handling = before


_modes: WeakSet[OwnMode] = WeakSet()
"""All modes of tracing."""


def insert_at_bottom(mode: OwnMode) -> None:
    """Make `mode` the outermost active torch function mode of this thread."""
    here = this_thread.number
    at_work = _is_expected(mode) and not is_active(mode)
    mode.thread = here
    mode.removed = False
    mode.placed = True
    if at_work:
        return  # torch puts the mode back
    if function_modes():
        _replace_all([mode, *(other for other in _all() if other is not mode)])
    else:
        push_function_mode(mode)


def remove(mode: OwnMode) -> None:
    """Remove `mode` from the stack; do nothing if it is not on the stack."""
    mode.placed = False
    mode.removed = True  # before anything else, so that `sweep` removes it if the rest fails
    active = _all()
    if mode.thread != this_thread.number:  # it stays on that thread's stack until it sweeps
        mode.thread = 0
    if len(active) == 1 and active[0] is mode:
        pop_function_mode()
    else:
        _replace_all([other for other in active if other is not mode])


def sweep() -> None:
    """Remove modes that torch put back after their removal.

    Torch takes a mode off the stack while it handles a call, and puts it back afterwards. It does
    so even if the mode was removed during the call, for example by an optimizer that steps within
    `loss.backward()`.
    """
    if not function_modes():
        return
    found = _all()
    gone = [mode for mode in found if isinstance(mode, OwnMode) and _is_gone(mode)]
    if gone:
        _replace_all([mode for mode in found if mode not in gone])


def _is_gone(mode: OwnMode) -> bool:
    return mode.removed or mode.thread != this_thread.number


@contextmanager
def aside() -> Iterator[None]:
    """Take our modes off the stack of this thread within a `with` block."""
    ours = [mode for mode in _all() if isinstance(mode, OwnMode)]
    if ours:
        _replace_all([mode for mode in _all() if mode not in ours])
    try:
        yield
    finally:
        back = [mode for mode in ours if not _is_gone(mode)]
        if back:
            _replace_all([*back, *(mode for mode in _all() if mode not in back)])


def at_work() -> bool:
    """Return whether one of our modes is handling a call, after which torch would put it back."""
    return not all(is_active(mode) for mode in [*_modes] if _is_expected(mode))


def _is_expected(mode: OwnMode) -> bool:
    """Return whether a mode is on the stack of this thread, or handling a call there."""
    here = this_thread.number
    return mode.handling == here or (mode.placed and mode.thread == here)


def any_active() -> bool:
    """Return whether one of our modes is on the stack of this thread."""
    return any(isinstance(mode, OwnMode) for mode in _all())


def is_placed(mode: OwnMode) -> bool:
    """Return whether `mode` is on the stack, or handling a call after which it is put back."""
    return mode.placed and mode.thread == this_thread.number


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether `mode` is on the stack."""
    return any(active is mode for active in _all())


def _all() -> list[TorchFunctionMode]:
    """Return the active modes, outermost first."""
    return [function_mode_at(i) for i in range(function_modes())]


def _replace_all(modes: list[TorchFunctionMode]) -> None:
    """Replace the stack with `modes`; no tensor code runs while the program's modes are removed."""
    for _ in range(function_modes()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
