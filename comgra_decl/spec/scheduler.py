"""Iterate over the recorded steps of a schedule."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from comgra_decl.spec.schedule import CadenceSpec


class Scheduler:
    """Determines which items of a sequence a schedule records: steps or evaluation phases.

    The result depends only on the cadence, not on earlier calls. It is computed fastest if the
    steps ascend, as in training. `seconds` is ignored.

    Args:
        cadence: the declared cadence.
        explicit: whether to consider only `steps` and `windows`.
    """

    def __init__(self, cadence: CadenceSpec, *, explicit: bool = False) -> None:
        self._steps = cadence.steps
        self._regular = None if explicit or self._steps is not None else _Regular(cadence)
        self._windows = cadence.windows
        self._ends = [last for _, last in cadence.windows]

    def next_after(self, step: int) -> int | None:
        """Return the smallest recorded step above `step`, or None if there is none.

        Steps count from 0, so `next_after(-1)` is the first recorded step.
        """
        found = None if self._regular is None else self._regular.next_after(step)
        if self._steps is not None:
            found = _earlier(found, _first_above(self._steps, step))
        if self._windows:
            found = _earlier(found, self._in_window(step))
        return found

    def _in_window(self, step: int) -> int | None:
        position = bisect_left(self._ends, step + 1)
        return max(self._windows[position][0], step + 1) if position < len(self._ends) else None


class _Regular:
    """The first steps, then multiples of `every` at growing gaps."""

    def __init__(self, cadence: CadenceSpec) -> None:
        self._cadence = cadence
        self._gaps = 0  # number of gaps before _current
        self._previous = -1
        self._current = self._start

    def next_after(self, step: int) -> int | None:
        """Like `Scheduler.next_after`."""
        cadence = self._cadence
        if step + 1 < cadence.first:
            return max(step + 1, 0)
        if cadence.every is None:
            return None
        if cadence.backoff == 1:
            return max(step // cadence.every + 1, 0) * cadence.every
        return self._backed_off(cadence.every, step)

    def _backed_off(self, every: int, step: int) -> int:
        if step < self._previous:
            self._gaps, self._previous, self._current = 0, -1, self._start
        while self._current <= step:
            gap = math.floor(every * math.pow(self._cadence.backoff, self._gaps))
            self._previous, self._current = self._current, self._current + gap
            self._gaps += 1
        return self._current

    @property
    def _start(self) -> int:
        """The first multiple of `every` that is not among the first steps."""
        every = self._cadence.every or 1
        return -(-self._cadence.first // every) * every


def _earlier(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)


def _first_above(ascending: list[int], step: int) -> int | None:
    position = bisect_right(ascending, step)
    return ascending[position] if position < len(ascending) else None
