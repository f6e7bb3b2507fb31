"""Detect losses that jump or become non-finite, so that the next steps are recorded."""

from __future__ import annotations

import math

_BLOCK = 16  # losses; the last two blocks define the usual range
_JUMP = 3.0  # threshold above the maximum, in units of this range
_MOST = 16  # maximum number of alarms per run


class LossAlarm:
    """Checks the losses in a run, in about a hundred nanoseconds per loss.

    A loss raises an alarm if it is not finite, or if it exceeds the largest of the last 16 to 32
    losses by more than three times their range and also by more than that largest loss's magnitude.
    After an alarm, 16 ordinary losses must pass before the next alarm. A run has at most 16 alarms.

    Attributes:
        reason: the reason for the alarm; None if there is no alarm or it has been handled.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._limit = math.inf
        self._low, self._high, self._count = math.inf, -math.inf, 0
        self._before: tuple[float, float] | None = None  # of the last complete block
        self._calm = 0  # ordinary losses still required before the next alarm
        self._left = _MOST

    def take(self, loss: float) -> None:
        """Check the next loss."""
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
        """Return the reason for an alarm, but only once."""
        reason, self.reason = self.reason, None
        return reason
