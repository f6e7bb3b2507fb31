"""The steps in which something is measured instead of recorded."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from comgra_decl.hooks.place import ProgramPlace

_log = logging.getLogger(__name__)

_FAILED = "{}: steps {} to {} are not measured, because of an error in comgra_decl itself ({}: {})"


@dataclass(frozen=True)
class Surroundings:
    """What a measurement needs to know about the program, and whom it informs.

    Attributes:
        tell: receives the name and content of each document.
        remark: receives the reason if something cannot be measured.
        place: returns where the program is.
    """

    tell: Callable[[str, Any], None]
    remark: Callable[[str], None]
    place: Callable[[], ProgramPlace]


class Measurement(ABC):
    """Measures consecutive steps. An error in it ends this measurement, but not tracing.

    Args:
        steps: the first and the last step.
        around: the program and the run.

    Attributes:
        first: the first step.
        last: the last step; below `first` if there are no more steps to measure.
    """

    name: ClassVar[str]
    """Its key in the spec."""

    def __init__(self, steps: Sequence[int], around: Surroundings) -> None:
        self.first, self.last = steps
        self._around = around
        self._steps_meant = self.first, self.last
        self._failed = False

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether it is attached to the program."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin to measure a step."""

    @abstractmethod
    def end(self, step: int) -> None:
        """Handle the end of a measured step."""

    @abstractmethod
    def finish(self) -> None:
        """Stop, and pass on what was measured."""

    def abandon(self) -> None:
        """Stop, and drop what was measured."""
        self.last = -1  # no further step is measured
        self._stop()

    def fail(self, error: BaseException) -> None:
        """End this measurement because of an error in it, which is reported once."""
        if self._failed:
            return
        self._failed = True
        kind = type(error).__name__
        self._around.remark(_FAILED.format(self.name, *self._steps_meant, kind, error))
        _log.info("where the measurement `%s` failed", self.name, exc_info=error)
        with suppress(Exception):  # it has already been reported
            self.abandon()

    @property
    def _on_fault(self) -> Callable[[BaseException], None]:
        return self.fail

    @abstractmethod
    def _stop(self) -> None:
        """Remove everything from the program. Idempotent."""


class Measured:
    """Begins and ends measurements with the steps of the program.

    Measured steps are not recorded, because recording takes time and memory itself.

    Args:
        measurements: what is measured, and when.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._measurements = [*measurements]
        self._ending = False

    @property
    def working(self) -> bool:
        """Whether the step in progress takes longer because of a measurement or its evaluation."""
        return self._ending or self.running

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
                _attempt(each, partial(each.begin, step))

    def end(self, step: int) -> None:
        """End the measurements of the step that is ending."""
        self._ending = True
        for each in reversed(self._measurements):
            if each.running:
                _attempt(each, partial(each.end, step))
        self._ending = False

    def finish(self) -> None:
        """End all measurements at the end of tracing."""
        for each in reversed(self._measurements):
            if each.running:
                _attempt(each, each.finish)

    def abandon(self) -> None:
        """Drop all measurements."""
        for each in reversed(self._measurements):
            _attempt(each, each.abandon)


def _attempt(measurement: Measurement, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        measurement.fail(error)
