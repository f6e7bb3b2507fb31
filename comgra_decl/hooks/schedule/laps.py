"""Measure the duration of steps by the host's clock and, if a device is in use, by its clock.

If a host never waits for its device, the host's clock measures the time to queue a step, not to run
it. An event is therefore recorded in the device's queue at the end of each step, and read after the
device has passed it. The time between two events is the duration of the step on the device, which
includes the time spent waiting for the host. These durations add up to the duration of training,
whether the host or the device is slower, and whether or not the program waits. This module never
waits for the device, and events are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_MOST_EVENTS = 64
"""The maximum number of pending events per device. Further steps are not timed on the device."""


@dataclass(slots=True, eq=False)
class Lap:
    """One completed step, or several steps for which only the end of the last one was observed.

    Attributes:
        steps: the number of steps.
        host: seconds per step by the host's clock; None if anything else happened during the steps.
        device: the same by the device's clock; None without a device, or if unknown.
        record: an object that identifies the record of this step, None if it was not recorded.
    """

    steps: int
    host: float | None
    device: float | None = None
    record: Any = None


class Mark:
    """An event of a device, used by at most two laps: one that it ends and one that it begins.

    Attributes:
        place: the device's index.
        event: the recorded event.
        uses: the number of laps that need the event, plus one if it is the latest mark.
    """

    __slots__ = ("event", "place", "uses")

    def __init__(self, place: int, event: Any) -> None:
        self.place, self.event, self.uses = place, event, 1


class Marks:
    """Inserts events into the queue of a device and checks whether they have passed; never waits.

    Args:
        device: the torch module of the device type: `torch.cuda`, or a substitute.
    """

    def __init__(self, device: Any = torch.cuda) -> None:
        self._device = device
        self._free: dict[int, list[Any]] = {}
        self._made: dict[int, int] = {}
        self._failed = False

    def new(self) -> Mark | None:
        """Record an event on the current stream.

        Returns:
            None if no device is in use, if a graph is being captured (the event would become part
            of it), or if too many events are pending.
        """
        device = self._device
        if self._failed or not device.is_initialized():
            return None
        try:
            if device.is_current_stream_capturing():
                return None
            place = device.current_device()
            event = self._event(place)
            if event is None:
                return None
            event.record()
        except (RuntimeError, AttributeError):
            # the device has failed, which the program will notice, or torch is built without it
            self._failed = True
            return None
        return Mark(place, event)

    def _event(self, place: int) -> Any:
        free = self._free.setdefault(place, [])
        if free:
            return free.pop()
        made = self._made.get(place, 0)
        if made >= _MOST_EVENTS:
            return None
        self._made[place] = made + 1
        return self._device.Event(enable_timing=True)

    def passed(self, *marks: Mark) -> bool:
        """Whether the device has passed all marks; also true if the device has failed."""
        if self._failed:
            return True
        try:
            # Querying an event would abort the capture of a graph.
            capturing = self._device.is_current_stream_capturing()
            return not capturing and all(mark.event.query() for mark in marks)
        except RuntimeError:
            self._failed = True
            return True

    def seconds(self, start: Mark, end: Mark) -> float | None:
        """Return the time between two marks that have both been passed."""
        if self._failed or start.place != end.place:
            return None
        try:
            return float(start.event.elapsed_time(end.event)) / 1000
        except RuntimeError:
            self._failed = True
            return None

    def release(self, mark: Mark | None) -> None:
        """End one use of a mark; its event is reused after the last one."""
        if mark is not None:
            mark.uses -= 1
            if not mark.uses:
                self._free[mark.place].append(mark.event)


class Laps:
    """Measures the durations of steps, and reports them in order as soon as they are known.

    Args:
        marks: provides the events that time the device.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self._last: float | None = None  # when the last step ended, by the host's clock
        self._start: Mark | None = None  # the same on the device
        self._waiting: deque[tuple[Lap, Mark | None, Mark | None]] = deque()

    def begin(self, now: float) -> None:
        """Begin a step now, instead of at the end of the last one."""
        self.restart()
        self._last, self._start = now, self._marks.new()

    def begin_if_unknown(self, clock: Callable[[], float]) -> None:
        """Begin a step now, unless the end of the last step is known."""
        if self._last is None:
            self.begin(clock())

    def end(self, now: float, *, steps: int = 1, record: Any = None) -> Lap:
        """End one or several steps; their time on the device may become known only later."""
        host = None if self._last is None else (now - self._last) / steps
        lap = Lap(steps, host, record=record)
        mark = self._marks.new()
        start, self._start, self._last = self._start, mark, now
        for used in (start, mark):
            if used is not None:
                used.uses += 1
        self._waiting.append((lap, start, mark))
        self._marks.release(start)
        return lap

    def known(self) -> Iterator[Lap]:
        """Yield the laps that are completely known, each once, in the order of the steps."""
        waiting, marks = self._waiting, self._marks
        while waiting:
            lap, start, end = waiting[0]
            if start is not None and end is not None:
                if not marks.passed(start, end):
                    return
                seconds = marks.seconds(start, end)
                lap.device = None if seconds is None else seconds / lap.steps
            waiting.popleft()
            marks.release(start)
            marks.release(end)
            yield lap

    @property
    def records_away(self) -> bool:
        """Whether the duration of a step with a record is still unknown."""
        return any(lap.record is not None for lap, _, _ in self._waiting)

    @property
    def away(self) -> bool:
        """Whether the last step that ended is timed by a device."""
        return self._start is not None

    def restart(self) -> None:
        """Exclude the time from the last step to the next one."""
        self._last = None
        self._marks.release(self._start)
        self._start = None
