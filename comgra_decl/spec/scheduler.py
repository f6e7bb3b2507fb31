"""Walks the recorded steps of a schedule."""

from __future__ import annotations

import math
from bisect import bisect_right

from comgra_decl.spec.schedule import ScheduleSpec


class Scheduler:
    """Tells which steps and evaluation phases a schedule records.

    The answer depends on the schedule alone, not on what was asked before; asking for ever later
    steps, as a training does, is quickest.
    """

    def __init__(self, schedule: ScheduleSpec) -> None:
        self._schedule = schedule
        self._gaps = 0  # gaps that lie before _current
        self._previous = -1
        self._current = self._start

    def next_after(self, step: int) -> int | None:
        """Returns the smallest recorded step above `step`, or None if there is none.

        Steps count from 0, so `next_after(-1)` is the first recorded step.
        """
        schedule = self._schedule
        if schedule.steps is not None:
            return _first_above(schedule.steps, step)
        if step + 1 < schedule.first:
            return max(step + 1, 0)
        if schedule.backoff == 1:
            return max(step // schedule.every + 1, 0) * schedule.every
        return self._backed_off(step)

    def eval_due(self, phase: int) -> bool:
        """Returns whether evaluation phase `phase` (counted from 0) is recorded."""
        evaluation = self._schedule.eval
        return evaluation is not None and phase % evaluation.every == 0

    def _backed_off(self, step: int) -> int:
        if step < self._previous:
            self._gaps, self._previous, self._current = 0, -1, self._start
        while self._current <= step:
            gap = math.floor(self._schedule.every * math.pow(self._schedule.backoff, self._gaps))
            self._previous, self._current = self._current, self._current + gap
            self._gaps += 1
        return self._current

    @property
    def _start(self) -> int:
        """The first multiple of `every` that is not among the first steps."""
        every = self._schedule.every
        return -(-self._schedule.first // every) * every


def _first_above(ascending: list[int], step: int) -> int | None:
    position = bisect_right(ascending, step)
    return ascending[position] if position < len(ascending) else None
