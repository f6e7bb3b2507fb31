"""The permitted cost of all records, or of those with one type of execution."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.spec.budget import BudgetSpec

_REPORT_AGAIN = 2.0
"""Factor by which a chosen value must change before it is reported again."""

_RECENT = 5
"""Number of most recent records whose median cost is reported."""

_NEVER = 4.0**15
"""Gaps that are stretched by this factor or more are not reported, because the budget is nearly
used up.
"""


class Allowance:
    """Limits time and disk space, and tracks how much of them is used.

    Time: the cost of a record is a debt. The fraction `share` of the time since the record began
        pays it off, and no record is due while a debt remains. A record can begin only at the start
        of a step, so it may begin up to one step late; the time until then counts towards the next
        record.

    Disk: whenever half of the remaining space is used, the gaps between records become four times
        longer. Each half of the remaining space therefore lasts twice as long as the previous one.
        A training run of unknown length is thus recorded until its end, at increasing intervals.

    Args:
        spec: the limits; a value of None means no limit.
        say: called with ("time" or "disk", a sentence) to report a choice.
        whose: the type of execution, "" for all records.
        before: the previous allowance, if the spec changed.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        say: Callable[[str, str], None],
        whose: str = "",
        before: Allowance | None = None,
    ) -> None:
        self._spec = spec
        self._share, self._limit = spec.share, spec.bytes
        self._say = say
        self._records_of = f"records of type {whose!r}" if whose else "records"
        self._record_of = f"a record of type {whose!r}" if whose else "a record"
        self._costs: deque[float] = deque(maxlen=_RECENT)  # of the newest records
        self._paid = -math.inf  # when the debt will be paid off
        self._reported: dict[str, float] = {}
        self.bytes = 0.0  # according to the latest measurement
        # counts now, at the latest measurement, and at the one before it
        self.records = self.then = self.before = 0
        if before is not None:
            self._paid, self.bytes = before._paid, before.bytes
            self.records, self.then, self.before = before.records, before.then, before.before

    # -- time ----------------------------------------------------------------------------------

    def indebted(self, now: float) -> bool:
        """Whether the cost of past records is still unpaid."""
        return self.debt(now) > 0

    def debt(self, now: float) -> float:
        """Return the seconds until past records are paid off."""
        return max(self._paid - now, 0.0)

    def charge(self, began: float, cost: float, *, step: float) -> None:
        """Add the cost of a record, in seconds, which may be an estimate.

        Args:
            began: when its step began.
            cost: in seconds.
            step: the duration of a step without a record.
        """
        if self._share is not None:
            self._paid = max(self._paid, began - step) + cost / self._share

    def correct(self, difference: float, *, cost: float) -> None:
        """Correct the cost of a record by `difference`, the excess over the charged amount."""
        if self._share is not None:
            self._costs.append(cost)
            self._paid += difference / self._share

    def report_gap(self, plain: float) -> None:
        """Report the new gap between records if a plain step takes `plain` seconds."""
        cost = median(self._costs) if self._costs else 0.0
        if self._share is None or cost <= 0:
            return
        gap = max(1, math.ceil(cost * (1 / self._share - 1) / max(plain, 1e-9)))
        if self._is_news("time", gap):
            self._say(
                "time",
                f"{self._record_of} costs about {_seconds(cost)} and a step without one "
                f"takes {_seconds(plain)}: to stay below {self._spec.time} of the time, "
                f"{self._records_of} are at least {gap} steps apart",
            )

    # -- disk ----------------------------------------------------------------------------------

    def measured(self, size: float) -> None:
        """Set the measured size of these records."""
        self.bytes = size
        self.before, self.then = self.then, self.records

    def per_record(self) -> float:
        """Average size of a record in bytes; 0 if none has been measured."""
        return self.bytes / self.then if self.then else 0.0

    def exhausted(self, per_record: float) -> bool:
        """Whether another record of about `per_record` bytes would exceed the disk limit."""
        if self._limit is None or self._used(per_record) + per_record <= self._limit:
            return False
        if self._is_news("full", 1.0):
            text = f"the disk budget of {self._spec.disk} is used up: no more {self._records_of}"
            self._say("disk", text)
        return True

    def factor(self, per_record: float) -> float:
        """Return the factor by which gaps are stretched to save space."""
        if self._limit is None:
            return 1.0
        left = max(1 - self._used(per_record) / self._limit, 2.0**-30)
        factor = 4.0 ** math.floor(-math.log2(left))
        if 1 < factor < _NEVER and self._is_news("disk", factor):
            self._say(
                "disk",
                f"{1 - left:.0%} of the disk budget of {self._spec.disk} is used: gaps between "
                f"{self._records_of} are {factor:.0f} times longer",
            )
        return factor

    def _used(self, per_record: float) -> float:
        """Bytes on disk, including data that is still being written.

        Records made since the second-to-last measurement may not have been written yet.
        """
        return self.bytes + (self.records - self.before) * per_record

    def _is_news(self, what: str, value: float) -> bool:
        """Whether `value` differs from the last reported one by more than a factor."""
        known = self._reported.get(what)
        if known is not None and known / _REPORT_AGAIN <= value <= known * _REPORT_AGAIN:
            return False
        self._reported[what] = value
        return True


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.2g} {unit}"
    return f"{value / 1e-6:.2g} us"
