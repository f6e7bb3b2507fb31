"""Isolate training from errors in tracing.

Functions that torch or the program calls must not raise. An error is passed to a callback and
reported once, and it ends tracing (`Ending`). `guarded` wraps methods that may fail. A plain `try`
is used instead:

- in methods called for each output or gradient of a step (`ModuleTracer._before` and `_after`,
  `TensorRecorder._on_gradient`), because a wrapper costs 0.1 us about 60 times per recorded step;
- where torch's frame is inspected and must be the direct caller (`sys._getframe(1)`);
- where the program's function must be called even if tracing fails, so that only part of the method
  is allowed to fail (wrappers and modes);
- in functions that the compiler skips or compiles according to their code (`run_natively`,
  `compiled/`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from comgra_decl.hooks import modes

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Guarded(Protocol):
    """A class with guarded methods."""

    @property
    def _on_fault(self) -> Callable[[BaseException], None]:
        """The callback that receives exceptions raised by the guarded methods."""


Owner = TypeVar("Owner", bound=Guarded)


def guarded(
    method: Callable[Concatenate[Owner, Given], Returned],
) -> Callable[Concatenate[Owner, Given], Returned | None]:
    """Wrap a method so that exceptions go to its object's `_on_fault` and the call returns None."""

    @functools.wraps(method)
    def guard(owner: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Returned | None:
        try:
            return method(owner, *args, **kwargs)
        except Exception as error:
            owner._on_fault(error)
            return None

    return guard


class Ending:
    """Ends tracing: on request, with the program, or after an error in tracing itself.

    Args:
        rest: stops recording immediately, without removing hooks.
        remove: removes all hooks from the program; may be called twice.
        on_fault: called with the first error in tracing itself, after all hooks have been removed.

    Attributes:
        requested: whether tracing ends with the step in progress.
        over: whether tracing has ended; set by `remove` as its first action.
        error: the error that ended tracing; None if there was none.
    """

    def __init__(
        self,
        *,
        rest: Callable[[], None],
        remove: Callable[[], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._rest = rest
        self._remove = remove
        self._on_fault = on_fault
        self.requested = False
        self.over = False
        self.error: BaseException | None = None
        self._waits = False

    @property
    def waits(self) -> bool:
        """Whether tracing ends as soon as it is safe to do so."""
        return self._waits

    def fault(self, error: BaseException) -> None:
        """End tracing because of an error in tracing itself, which does not affect training."""
        if self.over or self.error is not None:
            return
        self.error = error
        self.requested = True
        self.when_safe()

    def when_safe(self) -> None:
        """End tracing now, or on the next call of this method if a mode is handling a call.

        If a mode is removed while it handles a call, torch restores the mode when that call
        returns.
        """
        self._waits = True
        self._rest()
        if not modes.at_work():
            self.now()

    def now(self) -> None:
        """End tracing now."""
        for _ in range(2):  # retry if a removal fails
            try:
                self._remove()
                modes.sweep()
                break
            except Exception as error:
                self.error = self.error or error
        if self.error is not None:
            self._on_fault(self.error)
