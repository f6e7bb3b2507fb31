"""What some of the records may cost: all of them, or those of one type of execution."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.spec.budget import BudgetSpec

_SAY_AGAIN = 2.0
"""What was chosen is said again when it has changed by more than this factor."""

_RECENT = 5
"""Records whose median cost is said."""

_NEVER = 4.0**15
"""Gaps that are so many times longer are not worth saying: the budget is as good as used up."""


class Allowance:
    """A share of the time and a size on disk, and what of them is used.

    Time: every record makes a debt of what it cost, which is paid off with `share` of the time that
    passes from its beginning on; while there is a debt, none of them is due. A record can begin
    only where a step does, so it begins up to a step later than it might: that time is not lost.

    Disk: whenever half of what remained is used, gaps become four times longer. So each half of the
    remainder lasts twice as long as the one before, and a training of unknown length is recorded
    ever more rarely, but until its end.

    Args:
        spec: what is allowed; None in it means no limit.
        say: told what was chosen: ("time" or "disk", a sentence).
        whose: the type of execution, "" for all records.
        before: what it was before the spec changed.
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
        self._paid = -math.inf  # when the debt is paid off
        self._said: dict[str, float] = {}
        self.bytes = 0.0  # at the newest measurement
        self.records = self.then = self.before = 0  # now, at that measurement, at the one before
        if before is not None:
            self._paid, self.bytes = before._paid, before.bytes
            self.records, self.then, self.before = before.records, before.then, before.before

    # -- time ----------------------------------------------------------------------------------

    def indebted(self, now: float) -> bool:
        """Whether past records are still to be paid off."""
        return self.debt(now) > 0

    def debt(self, now: float) -> float:
        """Returns the seconds that will pass until past records are paid off."""
        return max(self._paid - now, 0.0)

    def charge(self, began: float, cost: float, *, step: float) -> None:
        """A record has cost so many seconds, or will turn out to.

        Args:
            began: when its step began.
            cost: in seconds.
            step: what a step without a record takes.
        """
        if self._share is not None:
            self._paid = max(self._paid, began - step) + cost / self._share

    def correct(self, difference: float, *, cost: float) -> None:
        """It is known what a record has cost, and by how much that is more than was charged."""
        if self._share is not None:
            self._costs.append(cost)
            self._paid += difference / self._share

    def tell_gap(self, plain: float) -> None:
        """Says how far apart records are from now on, if a step without one takes `plain` s."""
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
        """These records take so many bytes by now."""
        self.bytes = size
        self.before, self.then = self.then, self.records

    def per_record(self) -> float:
        """Bytes that a record takes on average, 0 if none has been measured."""
        return self.bytes / self.then if self.then else 0.0

    def exhausted(self, per_record: float) -> bool:
        """Whether another record, of about so many bytes, would be too much for the disk."""
        if self._limit is None or self._used(per_record) + per_record <= self._limit:
            return False
        if self._is_news("full", 1.0):
            text = f"the disk's budget of {self._spec.disk} is used up: no more {self._records_of}"
            self._say("disk", text)
        return True

    def factor(self, per_record: float) -> float:
        """By how much gaps are stretched to save space."""
        if self._limit is None:
            return 1.0
        left = max(1 - self._used(per_record) / self._limit, 2.0**-30)
        factor = 4.0 ** math.floor(-math.log2(left))
        if 1 < factor < _NEVER and self._is_news("disk", factor):
            self._say(
                "disk",
                f"{1 - left:.0%} of the disk's budget of {self._spec.disk} is used: gaps between "
                f"{self._records_of} are {factor:.0f} times longer",
            )
        return factor

    def _used(self, per_record: float) -> float:
        """Bytes on disk, with what is on its way there.

        What was recorded since the last measurement but one may not have been written yet.
        """
        return self.bytes + (self.records - self.before) * per_record

    def _is_news(self, what: str, value: float) -> bool:
        """Whether `value` differs from what was said last by more than a factor."""
        said = self._said.get(what)
        if said is not None and said / _SAY_AGAIN <= value <= said * _SAY_AGAIN:
            return False
        self._said[what] = value
        return True


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.2g} {unit}"
    return f"{value / 1e-6:.2g} us"
