"""The phases of a step on a device, by events that are read later.

The host's clock tells how long a phase takes to be queued. An event in the device's queue at the
beginning of each phase tells how long the device takes for it. Nothing waits: the times are read in
a later step, once the device has passed all events of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from comgra_decl.hooks.schedule import laps
from comgra_decl.hooks.schedule.laps import Mark

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
_END = "end"


class DevicePhases:
    """Times the phases of a step on the device that is in use, if there is one.

    The phases are those of the host (`Stopwatch`). `data` is the time from the device's end of a
    step to its first work of the next model call: a device that waits for a batch does so there.

    Args:
        tell: receives the name of each phase and its seconds.

    Attributes:
        ended: whether a step has ended whose times are not known yet.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._marks = laps.Marks()
        self._tell = tell
        self._passed: list[tuple[str, Mark]] = []  # what begins at each event
        self._timing = self.ended = False

    def begin(self) -> None:
        """Time the step that is about to begin, unless the last one is not known yet."""
        if not self._passed:
            self._timing = True
            self.at(DATA)

    def at(self, phase: str) -> None:
        """Handle the beginning of a phase in the step in progress."""
        if not self._timing:
            return
        mark = self._marks.new()
        if mark is None:
            self.stop()
        else:
            self._passed.append((phase, mark))

    def end(self) -> None:
        """Handle the end of the step."""
        self.at(_END)
        self.ended, self._timing = self.ended or self._timing, False

    def stop(self) -> None:
        """Do not time the step in progress."""
        self._timing = False
        if not self.ended:
            self._forget()

    def read(self) -> None:
        """Tell the times of the step that has ended, if the device has passed its end."""
        if self._marks.passed(*(mark for _, mark in self._passed)):
            for phase, seconds in self._times().items():
                self._tell(phase, seconds)
            self._forget()

    def _forget(self) -> None:
        for _, mark in self._passed:
            self._marks.release(mark)
        self._passed, self.ended = [], False

    def _times(self) -> dict[str, float]:
        names = [name for name, _ in self._passed]
        lasting = []
        for (_, begins), (_, ends) in pairwise(self._passed):
            seconds = self._marks.seconds(begins, ends)
            if seconds is None:
                return {}
            lasting.append(seconds)
        if FORWARD not in names:
            return {}
        found = {DATA: sum(lasting[: names.index(FORWARD)])}
        if BACKWARD in names:
            after = len(names) - 1 - names[::-1].index(BACKWARD)  # the last `backward`
            parts = [*zip(names, lasting[: after + 1], strict=False)]
            for phase in (FORWARD, BACKWARD):
                found[phase] = sum(seconds for name, seconds in parts if name == phase)
        if OPTIMIZER in names:
            found[OPTIMIZER] = sum(lasting[len(names) - 1 - names[::-1].index(OPTIMIZER) :])
        return found
