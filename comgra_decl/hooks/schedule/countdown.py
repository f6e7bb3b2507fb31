"""What is due next, of steps, evaluation phases, or steps of one type."""

from __future__ import annotations

from collections.abc import Callable

from comgra_decl.spec import Scheduler
from comgra_decl.spec.schedule import CadenceSpec


class Countdown:
    """Follows one cadence through a training.

    Args:
        cadence: what is declared.
        clock: seconds that pass evenly.
        factor: by how much gaps are stretched at present; explicit steps and windows are not.
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
        self.next = self._scheduler.next_after(-1)  # None: none but those the clock asks for
        self.forced = self._explicit.next_after(-1)  # the next explicit one

    def due(self, number: int) -> bool:
        """Whether `number` is to be recorded; one that was missed stays due."""
        return (self.next is not None and number >= self.next) or self.overdue

    def explicit(self, number: int) -> bool:
        """Whether `number` is to be recorded whatever it costs."""
        return self.forced is not None and number >= self.forced

    @property
    def overdue(self) -> bool:
        """Whether the last record lies too many seconds back."""
        return self._seconds is not None and self._clock() - self._last >= self._seconds

    def recorded(self, number: int) -> None:
        """`number` was recorded: waits for the next."""
        self.touched(number)
        self.next = self._stretched(number, self._scheduler.next_after(number))

    def touched(self, number: int) -> None:
        """`number` was recorded for another reason."""
        self.forced = self._explicit.next_after(number)
        if self._seconds is not None:
            self._last = self._clock()

    def _stretched(self, number: int, following: int | None) -> int | None:
        if following is None:
            return None
        later = number + round((following - number) * self._factor())
        return later if self.forced is None else min(later, self.forced)
