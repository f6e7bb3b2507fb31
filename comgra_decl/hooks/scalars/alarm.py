"""Notices losses that suddenly are not finite, or jump, so that the next steps are recorded."""

from __future__ import annotations

import math

_BLOCK = 16  # losses; the range of the last two blocks is what is usual
_JUMP = 3.0  # how many of these ranges above the largest of them
_MOST = 16  # alarms of a run


class LossAlarm:
    """Follows the losses of a training, about a hundred nanoseconds each.

    A loss is sudden if it is not finite, or above the largest of the last 16 to 32 losses by three
    times their range and at least by their own size. After an alarm it takes 16 ordinary losses
    until the next one, and there are at most 16 in a run.

    Attributes:
        reason: why there is an alarm; None if there is none, or it has been taken.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._limit = math.inf
        self._low, self._high, self._count = math.inf, -math.inf, 0
        self._before: tuple[float, float] | None = None  # of the last whole block
        self._calm = 0  # ordinary losses still to come until the next alarm
        self._left = _MOST

    def take(self, loss: float) -> None:
        """Takes the next loss."""
        if not -math.inf < loss <= self._limit:
            self._sound(loss)
            if not math.isfinite(loss):
                return
        elif self._calm:
            self._calm -= 1
        self._low, self._high = min(self._low, loss), max(self._high, loss)
        self._count += 1
        if self._count == _BLOCK:
            self._close()

    def _sound(self, loss: float) -> None:
        quiet, self._calm = not self._calm, _BLOCK
        if quiet and self._left:
            self._left -= 1
            kind = "jumped" if math.isfinite(loss) else "is not finite"
            self.reason = f"the loss {kind} ({loss:.4g})"

    def _close(self) -> None:
        low, high = self._low, self._high
        if self._before is not None:
            low, high = min(low, self._before[0]), max(high, self._before[1])
        self._before = self._low, self._high
        self._low, self._high, self._count = math.inf, -math.inf, 0
        self._limit = high + max(_JUMP * (high - low), abs(high))

    def taken(self) -> str | None:
        """Returns the reason of an alarm, once."""
        reason, self.reason = self.reason, None
        return reason
