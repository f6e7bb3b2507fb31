"""The steps in which something is measured instead of recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Measurement(Protocol):
    """Measures consecutive steps.

    Attributes:
        first: the first step.
        last: the last step; below `first` if there are no more steps to measure.
        running: whether it is attached to the program.
    """

    first: int
    last: int

    @property
    def running(self) -> bool:
        """Whether it is attached to the program."""

    def begin(self, step: int) -> None:
        """Begin to measure a step."""

    def end(self, step: int) -> None:
        """Handle the end of a measured step."""

    def finish(self) -> None:
        """Stop, and pass on what was measured."""

    def abandon(self) -> None:
        """Stop, and drop what was measured."""


class Measured:
    """Begins and ends measurements with the steps of the program.

    Measured steps are not recorded, because recording takes time and memory itself.

    Args:
        measurements: what is measured, and when.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._measurements = [*measurements]

    @property
    def running(self) -> bool:
        """Whether the step in progress is measured."""
        return any(each.running for each in self._measurements)

    def next_after(self, step: int) -> float:
        """Return the first measured step from `step` on; infinity if there is none."""
        ahead = [max(each.first, step) for each in self._measurements if each.last >= step]
        return min(ahead, default=math.inf)

    def begin(self, step: int) -> None:
        """Begin the measurements of the step that is about to begin."""
        for each in self._measurements:
            if each.first <= step <= each.last:
                each.begin(step)

    def end(self, step: int) -> None:
        """End the measurements of the step that is ending."""
        for each in reversed(self._measurements):
            if each.running:
                each.end(step)

    def finish(self) -> None:
        """End all measurements at the end of tracing."""
        for each in reversed(self._measurements):
            if each.running:
                each.finish()

    def abandon(self) -> None:
        """Drop all measurements."""
        for each in reversed(self._measurements):
            each.abandon()
