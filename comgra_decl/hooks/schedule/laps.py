"""How long steps take: by the host's clock, and by the device's where one is at work.

A host that never waits for its device runs ahead of it: its clock tells how long it took to ask
for a step, not how long the step took. So an event is recorded where a step ends, among the work of
that step, and is read later, when the device has passed it. From one event to the next is what the
step took at the device: its work, and how long it waited for the host. Added up, that is the time
that the training takes, whichever of the two is the slower one, and whether or not the program
waits. Nothing here ever waits for the device, and events are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_MOST_EVENTS = 64
"""Events of one device that are on their way at most; steps beyond that are not timed there."""


@dataclass(slots=True, eq=False)
class Lap:
    """A step that has ended, or several of which only the end of the last one was seen.

    Attributes:
        steps: how many steps.
        host: seconds of each by the host's clock; None if something else happened in between.
        device: the same by the device's clock; None if there is none, or it cannot be told.
        record: whatever stands for the record of this step, None if it was not recorded.
    """

    steps: int
    host: float | None
    device: float | None = None
    record: Any = None


class Mark:
    """An event of a device: in use for at most two laps, one that it ends and one that it begins.

    Attributes:
        place: the device's number.
        event: what was recorded there.
        uses: laps that still need it, and whether it is the newest one.
    """

    __slots__ = ("event", "place", "uses")

    def __init__(self, place: int, event: Any) -> None:
        self.place, self.event, self.uses = place, event, 1


class Marks:
    """Puts events among the work of a device and says when it has passed them, never waiting.

    Args:
        device: the module of torch that looks after the devices: `torch.cuda`, or a stand-in.
    """

    def __init__(self, device: Any = torch.cuda) -> None:
        self._device = device
        self._free: dict[int, list[Any]] = {}
        self._made: dict[int, int] = {}
        self._failed = False

    def new(self) -> Mark | None:
        """Records an event on the current stream.

        Returns:
            None if no device is in use, if a graph is being captured, which the event would become
            a part of, or if too many events are on their way already.
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
            # the device has failed, as the program is about to find out, or torch is built without
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
        """Whether the device has passed them all; also if that can no longer be told."""
        if self._failed:
            return True
        try:
            # Asking about an event ends the capture of a graph.
            capturing = self._device.is_current_stream_capturing()
            return not capturing and all(mark.event.query() for mark in marks)
        except RuntimeError:
            self._failed = True
            return True

    def seconds(self, start: Mark, end: Mark) -> float | None:
        """Returns the time from one mark to another, both of which have been passed."""
        if self._failed or start.place != end.place:
            return None
        try:
            return float(start.event.elapsed_time(end.event)) / 1000
        except RuntimeError:
            self._failed = True
            return None

    def release(self, mark: Mark | None) -> None:
        """One use of a mark is over; the event is used again after the last one."""
        if mark is not None:
            mark.uses -= 1
            if not mark.uses:
                self._free[mark.place].append(mark.event)


class Laps:
    """Tells how long each step took, in order, as soon as that is known.

    Args:
        marks: what times the device.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self._last: float | None = None  # when the last step ended, by the host's clock
        self._start: Mark | None = None  # where it ended, at the device
        self._waiting: deque[tuple[Lap, Mark | None, Mark | None]] = deque()

    def begin(self, now: float) -> None:
        """A step begins now; else it begins where the last one has ended."""
        self.restart()
        self._last, self._start = now, self._marks.new()

    def begin_if_unknown(self, clock: Callable[[], float]) -> None:
        """Something of a step happens: it begins now, unless the end of the last one is known."""
        if self._last is None:
            self.begin(clock())

    def end(self, now: float, *, steps: int = 1, record: Any = None) -> Lap:
        """A step has ended, or several; what it took at the device may be known later."""
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
        """Yields the laps of which all is known by now, each once, in the order of the steps."""
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
        """Whether it is not known yet how long a step with a record took."""
        return any(lap.record is not None for lap, _, _ in self._waiting)

    @property
    def away(self) -> bool:
        """Whether the last step that ended is timed by a device."""
        return self._start is not None

    def restart(self) -> None:
        """What has happened since the last step, or happens until the next, is no step."""
        self._last = None
        self._marks.release(self._start)
        self._start = None
