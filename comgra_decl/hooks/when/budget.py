"""What recording costs, and how much rarer records must become for it to stay within a budget."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comgra_decl.spec.budget import BudgetSpec

_REMEMBERED = 32
"""Steps without a record whose median duration is that of a plain step."""

_ENOUGH = 5
"""Steps without a record from which on their median is worth saying."""

_SAY_AGAIN = 2.0
"""What was chosen is said again when it has changed by more than this factor."""


class Meter:
    """What is measured elsewhere, by a thread that has the time: newest values, never read twice.

    Attributes:
        disk_bytes: size of the run's folder.
        polls: how often that was measured.
        writer_seconds: processor time of the writer thread until now.
    """

    def __init__(self) -> None:
        self.disk_bytes = 0.0
        self.polls = 0
        self.writer_seconds = 0.0


class Budget:
    """Keeps recording below a share of the time and a size on disk.

    Time: every record makes a debt of what it cost, and the training pays it off with `share` of
    the time that passes without records; while there is a debt, no record is due. A record cost
    what its step took longer than a plain one, but at least what the capture itself measured, and
    the processor time of the writer on top.

    Disk: whenever half of what remained is used, gaps become four times longer. So each half of the
    remainder lasts twice as long as the one before, and a training of unknown length is recorded
    ever more rarely, but until its end.

    Args:
        spec: the budget; None in it means no limit.
        meter: what is measured elsewhere.
        say: told what was chosen: ("time" or "disk", a sentence).
        clock: seconds that pass evenly.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        meter: Meter,
        say: Callable[[str, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.timed = spec.share is not None
        self._share = spec.share or 1.0
        self._limit = spec.bytes
        self._spec = spec
        self._meter = meter
        self._say = say
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)
        self._cost = 0.0  # of the last record
        self._last: float | None = None  # end of the last step
        self._paid = -math.inf  # when the debt will be paid off
        self._writer = meter.writer_seconds
        self._polls, self._polled = 0, 0.0
        self._records = self._then = self._before = 0  # now, at the newest measurement, the last
        self._said: dict[str, float] = {}

    # -- time ----------------------------------------------------------------------------------

    @property
    def indebted(self) -> bool:
        """Whether past records are still to be paid off."""
        return self.timed and self._clock() < self._paid

    def step_ended(self, cost: float | None) -> None:
        """A step has ended; `cost`: what its record is known to have cost, None without one."""
        now = self._clock()
        took = None if self._last is None else now - self._last
        self._last = now
        if cost is None:
            if took is not None:
                self._plain.append(took)
                if len(self._plain) == _ENOUGH:
                    self._tell_gap(median(self._plain))
            return
        plain = median(self._plain) if self._plain else math.inf
        self._charge(now, max(cost, 0.0 if took is None else took - plain), plain)

    def restart(self) -> None:
        """What has passed since the last step was no training step (an evaluation, a pause)."""
        self._last = None

    def _charge(self, now: float, cost: float, plain: float) -> None:
        written = self._meter.writer_seconds
        cost, self._writer = cost + written - self._writer, written
        self._paid = max(self._paid, now) + cost * (1 / self._share - 1)
        self._cost = cost
        if len(self._plain) >= _ENOUGH:
            self._tell_gap(plain)

    def _tell_gap(self, plain: float) -> None:
        """Says how far apart records are from now on."""
        gap = max(1, math.ceil(self._cost * (1 / self._share - 1) / max(plain, 1e-9)))
        if self._cost and self._news("time", gap):
            self._say(
                "time",
                f"a record costs about {_seconds(self._cost)} and a step without one takes "
                f"{_seconds(plain)}: to stay below {self._spec.time} of the time, records are at "
                f"least {gap} steps apart",
            )

    # -- disk ----------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether the disk's budget is used up."""
        if self._limit is None or self._used() + self._per_record() <= self._limit:
            return False
        if self._news("full", 1.0):
            self._say("disk", f"the disk's budget of {self._spec.disk} is used up: no more records")
        return True

    def factor(self) -> float:
        """By how much gaps are stretched to save space."""
        if self._limit is None:
            return 1.0
        left = max(1 - self._used() / self._limit, 2.0**-30)
        factor = 4.0 ** math.floor(-math.log2(left))
        if factor > 1 and self._news("disk", factor):
            self._say(
                "disk",
                f"{1 - left:.0%} of the disk's budget of {self._spec.disk} is used: gaps between "
                f"records are {factor:.0f} times longer",
            )
        return factor

    def recorded(self) -> None:
        """A record was handed over."""
        self._records += 1

    def _per_record(self) -> float:
        return self._polled / self._then if self._then else 0.0

    def _used(self) -> float:
        """Bytes on disk, with what is on its way there.

        What was recorded since the last measurement but one may not have been written yet.
        """
        if self._polls != self._meter.polls:
            self._polls, self._polled = self._meter.polls, self._meter.disk_bytes
            self._before, self._then = self._then, self._records
        return self._polled + (self._records - self._before) * self._per_record()

    def _news(self, what: str, value: float) -> bool:
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
