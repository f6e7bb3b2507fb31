"""Report a step that does not end, from another thread.

The report contains what each thread is doing, its stack trace, and the states of the data loaders'
workers. Time in which tracing itself works does not count as the program's.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from statistics import median
from types import FrameType

from comgra_decl.hooks.frames import Visit, own_module, variables
from comgra_decl.hooks.loader_workers import loader_workers
from comgra_decl.hooks.names import Names, Naming
from comgra_decl.hooks.place import phase_of

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
_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "data": "waiting for data",
}


class OwnWork:
    """Adds up the time of blocks in which tracing works, as `with own: ...`; blocks may be nested.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._depth = 0
        self._so_far: tuple[float, float | None] = (0.0, None)  # seconds, and since when it works
        # One attribute, because another thread that read two could count a block twice or never.

    @property
    def seconds(self) -> float:
        """The time so far, including that of the block in progress; readable from any thread."""
        spent, since = self._so_far
        return spent if since is None else spent + self._clock() - since

    def __enter__(self) -> None:
        if not self._depth:
            self._so_far = self._so_far[0], self._clock()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._so_far = self.seconds, None


class StallWatch:
    """Detects a stalled step from the step numbers observed about once a second.

    Args:
        report: called once per stalled step, for at most `MOST` steps, with (seconds since the last
            step ended, what the threads and the workers of data loaders are doing).
        naming: names the modules that the run knows.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        report: Callable[[float, str], None],
        *,
        naming: Naming = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._naming = naming
        self._clock = clock
        self._step = -1
        self._since = clock()
        self._own = 0.0  # seconds that tracing had worked by then
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._reported: set[int] = set()

    def look(self, step: int, *, excused: bool, own: float = 0.0) -> None:
        """Check whether the step in progress has stalled.

        Args:
            step: its number.
            excused: whether it may take any time, because the program evaluates or because it is
                measured.
            own: seconds that tracing itself has worked so far. They do not count.
        """
        now = self._clock()
        if step != self._step:
            if self._step >= 0 and step > self._step:
                took = now - self._since - max(own - self._own, 0.0)
                self._durations.append(max(took, 0.0) / (step - self._step))
                self._seen += step - self._step
            self._step, self._since, self._own = step, now, own
            return
        if excused:
            self._since, self._own = now, own
            return
        waited = now - self._since - (own - self._own)
        known = len(self._durations) >= _KNOWN or self._seen >= _STEPS
        if not known or step in self._reported or len(self._reported) >= MOST:
            return
        if waited >= max(LEAST, FACTOR * median(self._durations)):
            self._reported.add(step)
            self._report(waited, "\n".join([stacks(self._naming), *loader_workers()]))


def stacks(naming: Naming) -> str:
    """Return what all threads except our own are doing, with their stacks, the main thread first.

    Args:
        naming: names the modules that the run knows.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(number, f"thread {number}")
        if not name.startswith(_OURS) and number != threading.get_ident():
            lines = traceback.format_stack(frame)[-_MOST_FRAMES:]
            head = ", ".join([name, *_doing(frame, naming)])
            parts.append(f"{head}:\n{''.join(lines)}".rstrip())
    return "\n".join(parts)


def _doing(frame: FrameType, naming: Naming) -> list[str]:
    """Return what a thread does: the phase, and the module calls in progress."""
    frames: list[Visit] = []
    current: FrameType | None = frame
    while current is not None:
        frames.insert(0, Visit(current, current.f_lineno, current.f_lasti))
        current = current.f_back
    phase, _ = phase_of(frames)
    if phase == "other":
        return []
    modules = [
        module
        for visit in frames
        if visit.calls_module
        and (module := variables(visit.frame, lambda known, at=visit: own_module(known, at.frame)))  # type: ignore[misc]
        is not None
    ]
    if not modules:
        return [_PHASES[phase]]
    known = Names(naming)
    nodes = [known.module(module, within=modules[0]) for module in modules]
    path = f" (calls in progress: {' > '.join(nodes)})" if len(nodes) > 1 else ""
    return [f"{_PHASES[phase]} of {nodes[-1]}{path}"]
