"""Measure the cost of recording, and compute the gaps that keep it within the budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.schedule.allowance import Allowance
from comgra_decl.hooks.schedule.laps import Lap, Laps

if TYPE_CHECKING:
    from comgra_decl.spec.budget import BudgetSpec

_REMEMBERED = 32
"""The number of steps, and of records, over which medians are computed."""

_ENOUGH = 5
"""The number of plain steps required to report their median."""

_OTHERS = "*"


class Meter:
    """The latest values measured by another thread.

    Attributes:
        disk_bytes: size of the run's folder.
        polls: how often the size was measured.
        writer_seconds: CPU time used by the writer thread so far.
    """

    def __init__(self) -> None:
        self.disk_bytes = 0.0
        self.polls = 0
        self.writer_seconds = 0.0


@dataclass(slots=True, eq=False)
class _Record:
    """A record and what was charged for it.

    Attributes:
        cost: seconds spent by the training thread, as measured by its capture.
        to: the allowances it is charged to.
        once: seconds of its step spent on compiling, which occurs only once.
        charged: the amount charged initially.
        took: duration of its step by the host's clock, None if its start is unknown.
        host: extra duration of its step by the host's clock, once known.
        device: the same by the device's clock, None if unknown.
        timed: whether its step was timed by the device's clock.
    """

    cost: float
    to: list[Allowance]
    once: float = 0.0
    charged: float = 0.0
    took: float | None = None
    host: float = 0.0
    device: float | None = None
    timed: bool = False


class Times:
    """The latest measured durations of steps of one kind, in seconds, by both clocks."""

    def __init__(self) -> None:
        self.count = 0
        self.host: deque[float] = deque(maxlen=_REMEMBERED)
        self.device: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, host: float | None, device: float | None) -> None:
        """Add the times of a step; None if not measured."""
        self.count += 1
        if host is not None:
            self.host.append(host)
        if device is not None:
            self.device.append(device)

    def medians(self) -> dict[str, float | None]:
        """Return the median by each clock, None if nothing was measured."""
        return {
            "host": median(self.host) if self.host else None,
            "device": median(self.device) if self.device else None,
        }


class Budget:
    """Measures the cost of records, and charges it to the overall budget and those of their types.

    The cost of a record is the extra duration of its step compared with a plain step. If a device
    is used, its clock measures this cost (`laps`), because the host's clock measures only the time
    to queue the work, unless the program waits for the device. That cost becomes available some
    steps later. Until then, a record is assumed to cost as much as earlier records. Without a
    device, the cost of a record is at least the duration measured by the capture itself.

    The CPU time of the writer thread is added. With a device, it counts only to the extent that
    plain steps have taken longer than their median, because writing costs nothing while training
    waits for the device.

    The disk space of a record is the growth of the run's folder while the record was written. If
    several records were written in that time, they share the growth equally.

    Attributes:
        last_plain: the mean duration of the last steps without a record by the host's clock, in
            seconds; None if it is unknown.

    Args:
        spec: the budget of all records together; a value of None means no limit.
        meter: values measured by another thread.
        say: called with (the key of the spec below `schedule`, "time" or "disk", a sentence) to
            report a choice.
        types: budgets of types of execution; "*" for each type that is not named.
        clock: returns seconds of a monotonic clock.
        laps: measures the duration of steps.
        before: the previous budget, if the spec changed during the run.
    """

    def __init__(
        self,
        spec: BudgetSpec,
        *,
        meter: Meter,
        say: Callable[[str, str, str], None],
        types: Mapping[str, BudgetSpec] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        laps: Laps | None = None,
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
        self._own: dict[str, Allowance] = {}  # of types used so far
        self._laps = laps or Laps()
        self._plain, self._added = Times(), Times()  # plain steps; extra time of records
        self.last_plain: float | None = None
        if before is not None:
            for label in before._own:
                self._of(label)
            self._laps, self._plain, self._added = before._laps, before._plain, before._added
        self._before = None
        self._unknown = False  # whether there is no plain step yet to compare a record with
        self._last: _Record | None = None  # set until the duration of the next step is known
        # seconds that no other record will take
        self._once: float = 0.0 if before is None else before._once
        self._late = 0.0  # total excess of plain steps over their median
        self._written = 0.0  # CPU time of the writer not charged yet
        self._writer = meter.writer_seconds
        self._polls, self._size = 0, self._all.bytes
        self._parts: dict[str, float] = {}  # shares of the last written data, by type

    def _of(self, label: str) -> Allowance | None:
        """Return the allowance for the records of one type, None if it has no limit."""
        known = self._own.get(label)
        spec = self._types.get(label, self._types.get(_OTHERS))
        if known is not None or spec is None:
            return known
        before = None if self._before is None else self._before._own.get(label)
        say = partial(self._say, f"types.{label}.budget")
        own = self._own[label] = Allowance(spec, say=say, whose=label, before=before)
        return own

    def _concerned(self, labels: Collection[str]) -> list[Allowance]:
        """Return the allowances that apply to a record with these labels."""
        if not self._types:
            return [self._all]
        own = map(self._of, labels)
        return [self._all, *(each for each in own if each is not None)]

    # -- queries -------------------------------------------------------------------------------

    def indebted(self, *labels: str) -> bool:
        """Whether the cost of past records, overall or of one type, is still unpaid."""
        if not self.timed:
            return False
        if self._unknown:
            return True
        now = self._clock()
        return any(each.indebted(now) for each in self._concerned(labels))

    @property
    def steps_in_debt(self) -> int:
        """Half the number of steps until past records are paid off, in case steps become longer."""
        if not self.timed or self.attentive:
            return 0
        plain = self._plain.medians()
        step = plain["device"] or plain["host"]
        return int(self._all.debt(self._clock()) / step / 2) if step else 0

    @property
    def attentive(self) -> bool:
        """Whether the end of every step must be observed, because a record's cost is still unknown.

        Otherwise, the mean of several steps is sufficient.
        """
        unsettled = self._last is not None or self._laps.records_away
        return self.timed and (self._unknown or unsettled or self._plain.count < _ENOUGH)

    def exhausted(self, *labels: str) -> bool:
        """Whether the disk budget, of all records or of a type, is used up."""
        if not self._weighed:
            return False
        self._measure()
        return any(each.exhausted(self._per_record(each)) for each in self._concerned(labels))

    def factor(self, *labels: str) -> float:
        """Return the factor by which gaps are stretched to save space."""
        if not self._weighed:
            return 1.0
        self._measure()
        return max(each.factor(self._per_record(each)) for each in self._concerned(labels))

    # -- events --------------------------------------------------------------------------------

    def recorded(self, *labels: str) -> None:
        """Count a record of a training step with these labels."""
        self._measure()
        for each in self._concerned(labels):
            each.records += 1

    def begin(self) -> None:
        """Start a step at a model call, unless the start of the step is already known."""
        self._laps.begin_if_unknown(self._clock)

    def step_ended(
        self,
        cost: float | None,
        labels: Collection[str] = (),
        *,
        steps: int = 1,
        once: float = 0.0,
    ) -> None:
        """End a step and update the measured costs.

        Args:
            cost: the known cost of its record, in seconds; None without a record.
            labels: its types of execution.
            steps: how many steps have ended since the last call; 1 if there is a record.
            once: seconds of this step spent on compiling for records, which occurs only once. They
                are not included in `cost` or in the cost of records.
        """
        now = self._clock()
        self._once += once
        record = None if cost is None else _Record(cost, self._concerned(labels), once)
        lap = self._laps.end(now, steps=steps, record=record)
        if record is not None and self.timed:
            self._charge_at_first(record, now, lap)
        for known in self._laps.known():
            if known.record is None:
                self._learn_plain(known)
            else:
                self._learn_record(known)

    def _charge_at_first(self, record: _Record, now: float, lap: Lap) -> None:
        """Charge a record immediately: its known cost, or the median cost of earlier records."""
        self._unknown = self._laps.away and not self._plain.count
        began = now - (record.cost + record.once if lap.host is None else lap.host)
        plain = self._plain.medians()
        step = plain["device"] or plain["host"] or 0.0
        known = median(self._added.device) if self._added.device else None
        record.charged = record.cost if known is None else known
        for each in record.to:
            each.charge(began, record.charged, step=step)

    def _learn_plain(self, lap: Lap) -> None:
        """Process the measured time of a plain step."""
        self._unknown = False
        self.last_plain = lap.host
        late = None
        if lap.device is not None and self._plain.device and (self.timed or self._last):
            usual = median(self._plain.device)
            late = lap.steps * min(lap.device - usual, usual)  # records cause no more than that
            if self._last is None:
                self._late = max(self._late + late, -usual)
        if self._last is not None and not self._plain.count:
            self._last.host = _added_to(lap.host, self._last)
        self._settle(late or 0.0)
        self._plain.add(lap.host, lap.device)
        if self._plain.count == _ENOUGH:
            self._report_gaps()

    def _learn_record(self, lap: Lap) -> None:
        """Process the measured time of a step with a record."""
        self._settle(0.0)
        record: _Record = lap.record
        plain = self._plain.medians()
        record.took = lap.host
        record.host = _added_to(plain["host"], record)
        device = _difference(lap.device, plain["device"])
        record.device = None if device is None else max(device - record.once, 0.0)
        record.timed = lap.device is not None
        self._last = record
        if record.device is None and self._plain.count:
            self._settle(0.0)  # else the next step provides the plain duration

    def _settle(self, late: float) -> None:
        """Settle the cost of the last record once the duration of the next step is known.

        Args:
            late: how much longer the next step took on the device. Negative if the device had
                deferred work and completed it in that step.
        """
        record, self._last = self._last, None
        if record is None:
            return
        if record.device is not None:
            record.device += late
            cost = record.device
        elif record.timed or self._laps.away:
            cost = record.charged  # nothing to compare with yet
        else:
            cost = record.host
        self._added.add(record.host, record.device)
        cost += self._writers_part(beside_device=record.timed)
        for each in record.to:
            each.correct(cost - record.charged, cost=cost)
        if self._plain.count >= _ENOUGH:
            self._report_gaps()

    def _writers_part(self, *, beside_device: bool) -> float:
        """Return the cost of the writer thread since the last call."""
        written = self._meter.writer_seconds
        self._written, self._writer = self._written + written - self._writer, written
        part = self._written
        if beside_device:
            part = min(part, max(self._late, 0.0))
            self._late -= part
        self._written -= part
        return part

    def _report_gaps(self) -> None:
        if not self.timed:
            return
        plain = self._plain.medians()
        step = plain["device"] or plain["host"]
        if step is not None:
            for each in (self._all, *self._own.values()):
                each.report_gap(step)

    def restart(self) -> None:
        """Exclude the time since the last step (an evaluation, a pause) from the measurement."""
        self._laps.restart()

    @property
    def price(self) -> dict[str, Any] | None:
        """The measured times in seconds; None until both kinds of steps have been measured.

        `plain` is the duration of a step without a record and `added` the extra duration of a step
        with a record, each by the host's clock and the device's clock (None without a device).
        `once` is the time spent compiling for records, which is included in neither.
        """
        if not self._added.count or not self._plain.count:
            return None
        return {
            "records": self._added.count,
            "plain": self._plain.medians(),
            "added": self._added.medians(),
            "once": self._once,
        }

    # -- the disk ------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Read a new measurement, and distribute the folder's growth among the types."""
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


def _added_to(plain: float | None, record: _Record) -> float:
    """Return the extra duration of a record's step, if a plain step takes `plain`."""
    host = _difference(record.took, plain)
    return record.cost if host is None else max(host - record.once, record.cost)


def _difference(took: float | None, plain: float | None) -> float | None:
    return None if took is None or plain is None else took - plain
