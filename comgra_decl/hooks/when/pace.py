"""How many steps may pass before somebody looks up."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

_SECONDS = 0.25  # between two looks, at the present pace
_MOST = 32  # steps; a training that becomes slow is noticed soon enough


class Pace:
    """Says how many steps take about a quarter of a second.

    Reading a clock in every step takes a tenth of what tracing costs between recorded steps.

    Args:
        clock: seconds that pass evenly.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._step = 0
        self._time = clock()

    def steps(self, step: int) -> int:
        """Returns after how many steps from `step` on, which begins now, to look again: 0 to 32."""
        now = self._clock()
        passed, seconds = step - self._step, now - self._time
        self._step, self._time = step, now
        if passed <= 0 or seconds <= 0:
            return 0
        return min(_MOST, int(passed * _SECONDS / seconds))
