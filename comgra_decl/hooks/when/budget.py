"""What recording costs, and how much rarer records must become for it to stay within a budget."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from comgra_decl.hooks.when.allowance import Allowance

if TYPE_CHECKING:
    from comgra_decl.spec.budget import BudgetSpec

_REMEMBERED = 32
"""Steps without a record whose median duration is that of a plain step."""

_ENOUGH = 5
"""Steps without a record from which on their median is worth saying."""

_OTHERS = "*"


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
    """Measures what records cost, and charges it to all of them and to those of their types.

    A record cost what its step took longer than a plain one, but at least what the capture itself
    measured, and the processor time of the writer on top. On disk it took its part of what the
    run's folder has grown by while it was written, one of several its equal part.

    Args:
        spec: the budget of all records together; None in it means no limit.
        meter: what is measured elsewhere.
        say: told what was chosen: (the key of the spec below `schedule`, "time" or "disk", a
            sentence).
        types: budgets of types of execution; "*" for each of those that are not named.
        clock: seconds that pass evenly.
        before: the budget until now, where the spec has changed while the run lives.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        meter: Meter,
        say: Callable[[str, str, str], None],
        types: Mapping[str, BudgetSpec] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        before: Budget | None = None,
    ) -> None:
        self._types = types or {}
        each_spec = (spec, *self._types.values())
        self.timed = any(each.share is not None for each in each_spec)
        self._weighed = any(each.bytes is not None for each in each_spec)
        self._meter = meter
        self._say = say
        self._clock = clock
        self._before = before
        whole = None if before is None else before._all
        self._all: Allowance = Allowance(spec, say=partial(say, "budget"), before=whole)
        self._own: dict[str, Allowance] = {}  # of types that have been asked for
        if before is not None:
            for label in before._own:
                self._of(label)
        self._before = None
        self._plain: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: float | None = None  # end of the last step
        self._writer = meter.writer_seconds
        self._polls, self._size = 0, self._all.bytes
        self._parts: dict[str, float] = {}  # of what was written last, by type

    def _of(self, label: str) -> Allowance | None:
        """Returns what the records of one type may cost, None if there is no limit to that."""
        known = self._own.get(label)
        spec = self._types.get(label, self._types.get(_OTHERS))
        if known is not None or spec is None:
            return known
        before = None if self._before is None else self._before._own.get(label)
        say = partial(self._say, f"types.{label}.budget")
        own = self._own[label] = Allowance(spec, say=say, whose=label, before=before)
        return own

    def _concerned(self, labels: Collection[str]) -> list[Allowance]:
        """Returns what limits a record with these labels."""
        own = (self._of(label) for label in labels) if self._types else ()
        return [self._all, *(each for each in own if each is not None)]

    # -- what is asked -------------------------------------------------------------------------

    def indebted(self, *labels: str) -> bool:
        """Whether past records, all or those of a type, are still to be paid off."""
        if not self.timed:
            return False
        now = self._clock()
        return any(each.indebted(now) for each in self._concerned(labels))

    def exhausted(self, *labels: str) -> bool:
        """Whether the disk's budget, of all records or of a type, is used up."""
        if not self._weighed:
            return False
        self._measure()
        return any(each.exhausted(self._per_record(each)) for each in self._concerned(labels))

    def factor(self, *labels: str) -> float:
        """By how much gaps are stretched to save space."""
        if not self._weighed:
            return 1.0
        self._measure()
        return max(each.factor(self._per_record(each)) for each in self._concerned(labels))

    # -- what has happened ---------------------------------------------------------------------

    def recorded(self, *labels: str) -> None:
        """A record was handed over, of a step of training with these labels."""
        self._measure()
        for each in self._concerned(labels):
            each.records += 1

    def step_ended(self, cost: float | None, labels: Collection[str] = ()) -> None:
        """A step has ended.

        Args:
            cost: what its record is known to have cost, in seconds; None without one.
            labels: its types of execution.
        """
        now = self._clock()
        took = None if self._last is None else now - self._last
        self._last = now
        if cost is not None:
            plain = median(self._plain) if self._plain else math.inf
            self._charge(now, max(cost, 0.0 if took is None else took - plain), labels)
        elif took is not None:
            self._plain.append(took)
        if len(self._plain) == _ENOUGH or (cost is not None and len(self._plain) > _ENOUGH):
            for each in (self._all, *self._own.values()):
                each.tell_gap(median(self._plain))

    def _charge(self, now: float, cost: float, labels: Collection[str]) -> None:
        written = self._meter.writer_seconds
        cost, self._writer = cost + written - self._writer, written
        for each in self._concerned(labels):
            each.charge(now, cost)

    def restart(self) -> None:
        """What has passed since the last step was no training step (an evaluation, a pause)."""
        self._last = None

    # -- the disk ------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Takes a new measurement, and shares out what the folder has grown by."""
        if self._polls == self._meter.polls:
            return
        self._polls, size = self._meter.polls, self._meter.disk_bytes
        growth, self._size = size - self._size, size
        handed_over = self._all.records - self._all.then
        if handed_over:
            own = self._own.items()
            self._parts = {la: (each.records - each.then) / handed_over for la, each in own}
        self._all.measured(size)
        for label, each in self._own.items():
            each.measured(each.bytes + growth * self._parts.get(label, 0.0))

    def _per_record(self, allowance: Allowance) -> float:
        return allowance.per_record() or self._all.per_record()
