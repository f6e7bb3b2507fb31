"""The boundary between the training and our own faults.

What torch or the program calls of ours must not raise: a fault is handed over instead, is reported
once, and ends the tracing (`Ending`). `guarded` is put around methods that may fail. A plain `try`
stands in its place:

- where a call is made for each output or gradient of a step (`ModuleTracer._before` and `_after`,
  `TensorRecorder._on_gradient`): a layer more costs 0.1 us, about 60 times in each recorded step;
- where torch's own frame is looked at, which must be the next one (`sys._getframe(1)`);
- where the program's function has to be called whatever happens to ours, so that only a part of
  the method may fail (wrappers and modes);
- in what the compiler is kept from, or goes through, by its code (`run_natively`, `compiled/`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from comgra_decl.hooks import modes

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Guarded(Protocol):
    """Whoever has methods that are guarded."""

    @property
    def _on_fault(self) -> Callable[[BaseException], None]:
        """Takes what one of them raises."""


Owner = TypeVar("Owner", bound=Guarded)


def guarded(
    method: Callable[Concatenate[Owner, Given], Returned],
) -> Callable[Concatenate[Owner, Given], Returned | None]:
    """Hands what a method raises to `_on_fault` of its object; the call then returns None."""

    @functools.wraps(method)
    def guard(owner: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Returned | None:
        try:
            return method(owner, *args, **kwargs)
        except Exception as error:
            owner._on_fault(error)
            return None

    return guard


class Ending:
    """Whether tracing goes on, and how it ends: by request, with the program, or by a fault.

    Args:
        rest: stops recording at once, without taking anything off.
        remove: takes everything off the program; may be called twice.
        on_fault: given the first error of our own, once all is removed.

    Attributes:
        requested: whether tracing is to end with the step in progress.
        over: whether it has ended; set by `remove`, first of all.
        error: why, if it was a fault.
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
        """Whether tracing ends as soon as that is possible."""
        return self._waits

    def fault(self, error: BaseException) -> None:
        """Ends the tracing because of an error of ours, which never reaches the training."""
        if self.over or self.error is not None:
            return
        self.error = error
        self.requested = True
        self.when_safe()

    def when_safe(self) -> None:
        """Ends it now, or when it is next asked for.

        A mode that is removed while it handles a call comes back when that call returns.
        """
        self._waits = True
        self._rest()
        if not modes.at_work():
            self.now()

    def now(self) -> None:
        """Ends it now."""
        for _ in range(2):  # once more, if there is a fault in taking things off
            try:
                self._remove()
                modes.sweep()
                break
            except Exception as error:
                self.error = self.error or error
        if self.error is not None:
            self._on_fault(self.error)
