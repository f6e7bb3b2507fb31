"""What recording costs, and how much rarer records must become for it to stay within a budget."""

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
"""Steps without a record whose median duration is that of a plain step; records, likewise."""

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


@dataclass(slots=True, eq=False)
class _Record:
    """A record and what was charged for it.

    Attributes:
        cost: seconds of the training thread that its capture has measured itself.
        to: what is charged for it.
        once: seconds of its step that no other record will take: something was compiled.
        charged: what was charged at first.
        took: seconds of its step by the host's clock, None if it is not known when that began.
        host: by how much it made its step longer by the host's clock, as soon as that is known.
        device: the same by the device's clock, None if it cannot be told.
        timed: whether the device's clock timed its step.
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
    """What was measured of each step of one kind, by both clocks: the newest, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.host: deque[float] = deque(maxlen=_REMEMBERED)
        self.device: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, host: float | None, device: float | None) -> None:
        """Adds what is known of a step."""
        self.count += 1
        if host is not None:
            self.host.append(host)
        if device is not None:
            self.device.append(device)

    def medians(self) -> dict[str, float | None]:
        """Returns the median by each clock, None where nothing was measured."""
        return {
            "host": median(self.host) if self.host else None,
            "device": median(self.device) if self.device else None,
        }


class Budget:
    """Measures what records cost, and charges it to all of them and to those of their types.

    A record cost what its step took longer than a plain one. Where a device is at work, that is
    told by its clock (`laps`): by the host's alone, a record would cost nothing but the time to ask
    for it as long as the program does not wait for the device. It is known some steps later; until
    then records are taken to cost what they cost before. Without a device, a record cost at least
    what the capture itself measured.

    The processor time of the writer thread comes on top. Beside a device, it counts only as far as
    steps without a record have taken longer than their median: what is written while the training
    waits for the device costs it nothing.

    On disk a record took its part of what the run's folder has grown by while it was written, one
    of several its equal part.

    Args:
        spec: the budget of all records together; None in it means no limit.
        meter: what is measured elsewhere.
        say: told what was chosen: (the key of the spec below `schedule`, "time" or "disk", a
            sentence).
        types: budgets of types of execution; "*" for each of those that are not named.
        clock: seconds that pass evenly.
        laps: tells how long steps take.
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
        self._own: dict[str, Allowance] = {}  # of types that have been asked for
        self._laps = laps or Laps()
        self._plain, self._added = Times(), Times()  # steps without a record; what records add
        if before is not None:
            for label in before._own:
                self._of(label)
            self._laps, self._plain, self._added = before._laps, before._plain, before._added
        self._before = None
        self._unknown = False  # whether nothing is known yet that a record could be compared with
        self._last: _Record | None = None  # if the step after it is not known yet
        # seconds that no other record will take
        self._once: float = 0.0 if before is None else before._once
        self._late = 0.0  # by how much plain steps have taken longer than their median
        self._written = 0.0  # processor time of the writer since then
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
        if self._unknown:
            return True
        now = self._clock()
        return any(each.indebted(now) for each in self._concerned(labels))

    @property
    def steps_in_debt(self) -> int:
        """Steps for which past records will be paid off, halved: steps may become longer."""
        if not self.timed or self.attentive:
            return 0
        plain = self._plain.medians()
        step = plain["device"] or plain["host"]
        return int(self._all.debt(self._clock()) / step / 2) if step else 0

    @property
    def attentive(self) -> bool:
        """Whether the end of each step is to be seen: what the last record has cost is not known.

        Otherwise the mean of several steps will do.
        """
        unsettled = self._last is not None or self._laps.records_away
        return self.timed and (self._unknown or unsettled or self._plain.count < _ENOUGH)

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

    def begin(self) -> None:
        """The model is called, maybe first of all: then the step has begun, as far as is known."""
        self._laps.begin_if_unknown(self._clock)

    def step_ended(
        self,
        cost: float | None,
        labels: Collection[str] = (),
        *,
        steps: int = 1,
        once: float = 0.0,
    ) -> None:
        """A step has ended.

        Args:
            cost: what its record is known to have cost, in seconds; None without one.
            labels: its types of execution.
            steps: how many steps have ended since the last call; one, if there is a record.
            once: seconds of this step in which something was compiled for records, which no other
                record will take; not in `cost`. They are no part of what records cost.
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
        """Charges what is known of a record at once: its cost, or what such records cost before."""
        self._unknown = self._laps.away and not self._plain.count
        began = now - (record.cost + record.once if lap.host is None else lap.host)
        plain = self._plain.medians()
        step = plain["device"] or plain["host"] or 0.0
        known = median(self._added.device) if self._added.device else None
        record.charged = record.cost if known is None else known
        for each in record.to:
            each.charge(began, record.charged, step=step)

    def _learn_plain(self, lap: Lap) -> None:
        """It is known how long a step without a record took."""
        self._unknown = False
        late = None
        if lap.device is not None and self._plain.device and (self.timed or self._last):
            usual = median(self._plain.device)
            late = lap.steps * min(lap.device - usual, usual)  # more is not of our making
            if self._last is None:
                self._late = max(self._late + late, -usual)
        if self._last is not None and not self._plain.count:
            self._last.host = _added_to(lap.host, self._last)
        self._settle(late or 0.0)
        self._plain.add(lap.host, lap.device)
        if self._plain.count == _ENOUGH:
            self._tell_gaps()

    def _learn_record(self, lap: Lap) -> None:
        """It is known how long a step with a record took."""
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
            self._settle(0.0)  # else the next step says what one takes without a record

    def _settle(self, late: float) -> None:
        """Settles what the last record has cost, now that the step after it is known.

        Args:
            late: by how much that step took longer at the device: less than none, where the device
                had put off some of the record's work that it then had time for.
        """
        record, self._last = self._last, None
        if record is None:
            return
        if record.device is not None:
            record.device += late
            cost = record.device
        elif record.timed or self._laps.away:
            cost = record.charged  # there is nothing yet to compare it with
        else:
            cost = record.host
        self._added.add(record.host, record.device)
        cost += self._writers_part(beside_device=record.timed)
        for each in record.to:
            each.correct(cost - record.charged, cost=cost)
        if self._plain.count >= _ENOUGH:
            self._tell_gaps()

    def _writers_part(self, *, beside_device: bool) -> float:
        """Returns what the writer thread has cost since this was last asked."""
        written = self._meter.writer_seconds
        self._written, self._writer = self._written + written - self._writer, written
        part = self._written
        if beside_device:
            part = min(part, max(self._late, 0.0))
            self._late -= part
        self._written -= part
        return part

    def _tell_gaps(self) -> None:
        if not self.timed:
            return
        plain = self._plain.medians()
        step = plain["device"] or plain["host"]
        if step is not None:
            for each in (self._all, *self._own.values()):
                each.tell_gap(step)

    def restart(self) -> None:
        """What has passed since the last step was no training step (an evaluation, a pause)."""
        self._laps.restart()

    @property
    def price(self) -> dict[str, Any] | None:
        """What was measured until now, in seconds; None as long as a record has nothing beside it.

        `plain`: what a step without a record takes. `added`: by how much a record makes a step
        longer. Both by the clock of the host and by that of the device (None without one). `once`:
        what compiling for records has taken, which is in neither.
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


def _added_to(plain: float | None, record: _Record) -> float:
    """Returns by how much a record made its step longer, if a step without one takes `plain`."""
    host = _difference(record.took, plain)
    return record.cost if host is None else max(host - record.once, record.cost)


def _difference(took: float | None, plain: float | None) -> float | None:
    return None if took is None or plain is None else took - plain
