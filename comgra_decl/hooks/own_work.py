"""The time that tracing itself takes within a step, so that it is not blamed on the program."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnWork:
    """Adds up the time of blocks in which tracing works, as `with own: ...`; blocks may be nested.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent = 0.0
        self._since = 0.0
        self._depth = 0

    @property
    def seconds(self) -> float:
        """The time so far, including that of the block in progress; readable from any thread."""
        since = self._since
        return self._spent + (self._clock() - since if self._depth else 0.0)

    def __enter__(self) -> None:
        if not self._depth:
            self._since = self._clock()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._spent += self._clock() - self._since
