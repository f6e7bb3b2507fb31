"""Determine what is due next: a step, an evaluation phase, or a step of one type."""

from __future__ import annotations

from collections.abc import Callable

from comgra_decl.spec import Scheduler
from comgra_decl.spec.schedule import CadenceSpec


class Countdown:
    """Tracks one cadence throughout training.

    Args:
        cadence: the cadence in the spec.
        clock: returns seconds of a monotonic clock.
        factor: returns the factor by which gaps are currently stretched; explicit steps and windows
            are unaffected.
    """

    def __init__(
        self,
        cadence: CadenceSpec,
        *,
        clock: Callable[[], float],
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._scheduler = Scheduler(cadence)
        self._explicit = Scheduler(cadence, explicit=True)
        self._seconds = cadence.seconds
        self._clock = clock
        self._factor = factor
        self._last = clock()
        self.next = self._scheduler.next_after(-1)  # None: a step is due only by the clock
        self.forced = self._explicit.next_after(-1)  # the next explicit one

    def due(self, number: int) -> bool:
        """Whether `number` is due. If a number is missed, it remains due."""
        return (self.next is not None and number >= self.next) or self.overdue

    def explicit(self, number: int) -> bool:
        """Whether to record `number` regardless of cost."""
        return self.forced is not None and number >= self.forced

    @property
    def overdue(self) -> bool:
        """Whether too many seconds have passed since the last record."""
        return self._seconds is not None and self._clock() - self._last >= self._seconds

    def recorded(self, number: int) -> None:
        """Handle the recording of `number`, and compute the next number."""
        self.touched(number)
        self.next = self._stretched(number, self._scheduler.next_after(number))

    def touched(self, number: int) -> None:
        """Handle the recording of `number` for another reason."""
        self.forced = self._explicit.next_after(number)
        if self._seconds is not None:
            self._last = self._clock()

    def _stretched(self, number: int, following: int | None) -> int | None:
        if following is None:
            return None
        later = number + round((following - number) * self._factor())
        return later if self.forced is None else min(later, self.forced)
