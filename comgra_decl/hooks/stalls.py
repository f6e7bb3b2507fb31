"""Report a step that does not end, with the stack traces of all threads, from another thread."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from statistics import median

FACTOR = 10.0
"""A step counts as stalled if it takes this many times the median."""

LEAST = 5.0
"""Minimum duration of a stalled step, in seconds."""

MOST = 8
"""Maximum number of stalled steps reported in a run."""

_KNOWN = 3  # minimum number of observed durations
_STEPS = 20  # or of steps that they cover
_REMEMBERED = 64
_MOST_FRAMES = 24
_OURS = "comgra-"


class StallWatch:
    """Detects a stalled step from the step numbers observed about once a second.

    Args:
        report: called once per stalled step, for at most `MOST` steps, with (seconds since the last
            step ended, the stacks).
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, report: Callable[[float, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._step = -1
        self._since = clock()
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._reported: set[int] = set()

    def look(self, step: int, *, evaluating: bool) -> None:
        """Check whether the step in progress has stalled.

        Args:
            step: its number.
            evaluating: whether the program evaluates, which may take any time.
        """
        now = self._clock()
        if step != self._step:
            if self._step >= 0 and step > self._step:
                self._durations.append((now - self._since) / (step - self._step))
                self._seen += step - self._step
            self._step, self._since = step, now
            return
        if evaluating:
            self._since = now
            return
        waited = now - self._since
        known = len(self._durations) >= _KNOWN or self._seen >= _STEPS
        if not known or step in self._reported or len(self._reported) >= MOST:
            return
        if waited >= max(LEAST, FACTOR * median(self._durations)):
            self._reported.add(step)
            self._report(waited, stacks())


def stacks() -> str:
    """Return the stacks of all threads except our own, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(number, f"thread {number}")
        if not name.startswith(_OURS) and number != threading.get_ident():
            lines = traceback.format_stack(frame)[-_MOST_FRAMES:]
            parts.append(f"{name}:\n{''.join(lines)}".rstrip())
    return "\n".join(parts)
