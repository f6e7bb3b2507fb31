"""Decide on the writer thread which captured steps to store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from comgra_decl.keep.finding_ring import Answer, FindingRing, Request
from comgra_decl.keep.ring import Allowance, Entry, Ring
from comgra_decl.keep.step_numbers import Names, StepNumbers
from comgra_decl.keep.triggers import Function, Nonfinite, Quantile, Spike, Trigger
from comgra_decl.records import Note, RawStep, SlotInfo, StepBatch, StepInfo, Structure
from comgra_decl.spec.keep import FunctionTrigger, KeepSpec, QuantileTrigger, SpikeTrigger

if TYPE_CHECKING:
    from comgra_decl.spec.keep import Trigger as TriggerSpec

_log = logging.getLogger("comgra_decl")

DOCUMENT = "keep"
"""Name of the document with each trigger's count and state."""

Finalise = Callable[[list[RawStep]], list[StepBatch]]
Watch = Callable[[list[StepBatch]], Sequence[Request]]


@dataclass(slots=True)
class _Place:
    """A finalised step that is waiting; `index` is its position in `batch`."""

    batch: StepBatch
    index: int
    spare: dict[int, NDArray[Any]]


_Payload = RawStep | _Place


@dataclass(slots=True)
class _Carried:
    """Data that must be stored even if its step is dropped."""

    slots: list[SlotInfo] = field(default_factory=list)
    structures: list[Structure] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)

    def take(self, raw: RawStep) -> None:
        """Collect the data of a step."""
        self.slots += raw.new_slots
        if raw.structure is not None:
            self.structures.append(raw.structure)
        self.documents.update(raw.documents)

    def give(self, batch: StepBatch) -> None:
        """Prepend the collected data to a batch."""
        batch.new_slots = [*self.slots, *batch.new_slots]
        batch.new_structures = [*self.structures, *batch.new_structures]
        batch.documents = {**self.documents, **batch.documents}
        self.slots, self.structures, self.documents = [], [], {}


class Keeper:
    """Receives every captured step and returns the steps to store, in order.

    Steps wait in finalised form, which takes a fraction of their raw size. If a step is dropped
    within the same call, only the statistics that triggers need are computed, and no histograms.

    Args:
        spec: the spec's `keep` section.
        finalise: turns raw steps into batches to store.
        look: like `finalise`, but computes only the given `statistics`, for triggers.
        statistics: names of all statistics, in stored order.
        note: called with a note for the run when a trigger fires.
        exhausted: called when no more steps can be kept, so that only scheduled steps need
            capturing.
        watch: passes the steps to be stored to the rules, in order, and returns the steps that
            their findings request; None if findings keep no steps.
    """

    def __init__(
        self,
        spec: KeepSpec,
        *,
        finalise: Finalise,
        look: Callable[[list[RawStep], tuple[str, ...]], list[StepBatch]],
        statistics: tuple[str, ...],
        note: Callable[[Note], None] = lambda _: None,
        exhausted: Callable[[], None] = lambda: None,
        watch: Watch | None = None,
    ) -> None:
        self._spec = spec
        self._note, self._exhausted = note, exhausted
        self._finalise, self._look = finalise, look
        self._triggers = [_trigger(trigger) for trigger in spec.when]
        self._statistics = _needed(self._triggers, statistics)
        self._names = Names()
        self._carried, self._news = _Carried(), _Carried()  # for the store, and for the rules
        allowance = Allowance(spec.at_most)
        self._ring: Ring[_Payload] = Ring(
            before=spec.ring,
            after=spec.after,
            allowance=allowance,
            patient=spec.values,
            whole=watch is not None,
        )
        self._watch = watch
        self._second: FindingRing[_Payload] | None = None
        if watch is not None:
            again: Ring[_Payload] = Ring(before=spec.ring, after=spec.after, allowance=allowance)
            self._second = FindingRing(again, watch=self._show, answer=self._note_answer)
        self._fired = [{"fired": 0, "first": None, "last": None} for _ in self._triggers]
        self._taken = self._stored = self._kept = self._given_up = 0
        self._exhausted_at: int | None = None
        self._last_reason: str | None = None  # why the ring is kept at the end
        self._ranges: list[list[int]] = []  # (first, last) of each range of kept steps
        self._unseen: list[list[int]] = []  # the same for steps that rules have not checked

    def __call__(self, steps: list[RawStep]) -> list[StepBatch]:
        """Add the next steps; return the batches to store now."""
        for raw in steps:
            self._names.add(raw.new_slots)
            self._carry(raw)
        stored = self._push(steps, self._reasons(steps))
        stored += self._compacted(self._ring)
        if self._second is not None:
            stored = self._second(stored)
            stored += self._compacted(self._second.ring)
        return self._batches(stored)

    def keep_ring(self, reason: str) -> None:
        """Make `close` keep all steps that are still held; may be called from any thread."""
        self._last_reason = reason

    def close(self) -> list[StepBatch]:
        """Return the last batches to store: the scheduled steps still waiting.

        No steps may follow.
        """
        if self._last_reason is not None:
            self._ring.keep_held(f"before the end: {self._last_reason}")
        for trigger in self._triggers:
            if trigger.trouble is not None:
                _log.warning("comgra.keep: %s never fired: %s", trigger.name, trigger.trouble)
        left = self._ring.flush()
        if self._second is not None:
            left = self._second.close(left)
        batches = self._batches(left) or [StepBatch.of_documents({})]
        self._attach(batches[-1], changed=True)
        return batches

    # -- deciding

    def _reasons(self, steps: list[RawStep]) -> list[list[str]]:
        """Return the reasons to keep each step, if any."""
        reasons: list[list[str]] = [[] for _ in steps]
        start = 0
        for batch in self._look(steps, self._statistics) if not self._ring.exhausted else []:
            kpis = [_kpis(raw) for raw in steps[start : start + len(batch.steps)]]
            look = StepNumbers(batch, self._statistics, self._names, kpis)
            for number, trigger in enumerate(self._triggers):
                for i, reason in sorted(trigger.look(look).items()):
                    reasons[start + i].append(reason)
                    self._count(number, batch.steps[i], reason)
            start += len(batch.steps)
        return reasons

    def _count(self, trigger: int, info: StepInfo, reason: str) -> None:
        fired, step = self._fired[trigger], info.step
        if fired["first"] is None:
            name = self._triggers[trigger].name
            _log.info("comgra.keep: %s fired for the first time, at step %d", name, step)
            fired["first"] = step
        fired["fired"] = (fired["fired"] or 0) + 1
        fired["last"] = step
        self._note(Note(step, info.type, info.time, f"kept for {reason}"))

    def _push(self, steps: list[RawStep], reasons: list[list[str]]) -> list[Entry[_Payload]]:
        stored: list[Entry[_Payload]] = []
        for raw, why in zip(steps, reasons, strict=True):
            entry: Entry[_Payload] = Entry(raw.info.step, raw.scheduled, raw)
            stored += self._ring.push(entry, why)
        self._taken += len(steps)
        if self._ring.exhausted and self._exhausted_at is None and steps:
            self._exhausted_at = steps[-1].info.step
            _log.warning(
                "comgra.keep: triggers have stored %s records, the maximum (comgra.keep.at_most); "
                "from now on, only scheduled steps are recorded",
                self._spec.at_most,
            )
            self._exhausted()
        return stored

    def _warn_given_up(self, number: int) -> None:
        if not self._given_up:
            _log.warning(
                "comgra.keep: %d steps take more than the %d MiB of comgra.keep.memory_mb; "
                "fewer steps are kept before a trigger fires",
                self._spec.ring,
                self._spec.memory_mb,
            )
        self._given_up += number

    # -- requests of findings

    def _show(self, entries: Sequence[Entry[_Payload]]) -> Sequence[Request]:
        """Pass stored steps to the rules."""
        assert self._watch is not None
        self._finish(entries)
        batches = []
        for _, group in groupby(entries, key=_origin):
            members = list(group)
            for entry in members:
                _settle(entry)
            batches.append(_part([e.payload for e in members if isinstance(e.payload, _Place)]))
        if batches:
            self._news.give(batches[0])
        return self._watch(batches)

    def _note_answer(self, answer: Answer) -> None:
        """Log a note about the steps that a finding has kept."""
        request, kept = answer
        after = f" and {self._spec.after} after" if self._spec.after else ""
        which = "no more than before" if kept is None else "steps {} to {}".format(*kept) + after
        text = f"kept for {request.reason} at step {request.step}: {which}"
        self._note(Note(request.step, "train", time.time(), text))

    # -- storing

    def _carry(self, raw: RawStep) -> None:
        """Collect the data of a step that must be stored even if the step is dropped."""
        self._carried.take(raw)
        if self._second is not None:
            self._news.take(raw)
        raw.new_slots, raw.structure, raw.documents = [], None, {}

    def _compacted(self, ring: Ring[_Payload]) -> list[Entry[_Payload]]:
        """Finalise a ring's steps and apply the memory limit; return the steps to store."""
        self._finish(ring.pending)
        others = 0 if ring is self._ring else sum(e.nbytes for e in self._ring.pending)
        left, given_up = ring.shrink(max(0, (self._spec.memory_mb << 20) - others))
        if given_up:
            self._warn_given_up(given_up)
        return left

    def _finish(self, entries: Iterable[Entry[_Payload]]) -> None:
        """Finalise raw steps and measure their size."""
        waiting = [(e, e.payload) for e in entries if isinstance(e.payload, RawStep)]
        finished = iter(waiting)
        for batch in self._finalise([raw for _, raw in waiting]):
            share = batch.nbytes // len(batch.steps)
            for index in range(len(batch.steps)):
                entry, raw = next(finished)
                spare = raw.spare_values
                entry.payload = _Place(batch, index, spare)
                entry.nbytes = share + sum(value.nbytes for value in spare.values())

    def _batches(self, entries: Sequence[Entry[_Payload]]) -> list[StepBatch]:
        """Return the entries as batches; the first one also carries the collected data."""
        batches: list[StepBatch] = []
        for _, group in groupby(entries, key=_origin):
            members = list(group)
            for entry in members:
                _settle(entry)
            raw = [e.payload for e in members if isinstance(e.payload, RawStep)]
            places = [e.payload for e in members if isinstance(e.payload, _Place)]
            batches += self._finalise(raw) if raw else [_part(places)]
        self._stored += len(entries)
        self._kept += sum(not entry.scheduled for entry in entries)
        for entry in entries:
            if entry.reasons:
                _extend(self._ranges, entry.step)
            if self._second is not None and not entry.seen:
                _extend(self._unseen, entry.step)
        if batches:
            self._attach(batches[0], changed=any(entry.reasons for entry in entries))
        return batches

    def _attach(self, batch: StepBatch, *, changed: bool) -> StepBatch:
        self._carried.give(batch)
        if changed:
            batch.documents[DOCUMENT] = self._summary()
        return batch

    def _summary(self) -> dict[str, Any]:
        return {
            "captured": self._taken,
            "stored": self._stored,
            "kept": self._kept,
            "given_up": self._given_up,
            "steps": [list(span) for span in self._ranges],
            "unseen": [list(span) for span in self._unseen],
            "exhausted_at": self._exhausted_at,
            "triggers": [
                {**self._fired[number], "name": trigger.name, "trouble": trigger.trouble}
                for number, trigger in enumerate(self._triggers)
            ],
        }


def _kpis(raw: RawStep) -> dict[str, float]:
    """Return a step's recorded and logged values; wait for devices."""
    return {**{name: float(value) for name, value in raw.logged.items()}, **raw.kpis}


def _extend(ranges: list[list[int]], step: int) -> None:
    if ranges and step <= ranges[-1][1] + 1:
        ranges[-1][1] = max(ranges[-1][1], step)
    else:
        ranges.append([step, step])


def _origin(entry: Entry[_Payload]) -> int:
    """Return a key: consecutive entries of one origin form one batch."""
    return -1 if isinstance(entry.payload, RawStep) else id(entry.payload.batch)


def _settle(entry: Entry[_Payload]) -> None:
    """Record why a step is kept, and add the values that are stored only for kept steps."""
    payload = entry.payload
    if not entry.reasons:
        return
    if isinstance(payload, RawStep):
        info = payload.info
        payload.values = {**payload.values, **payload.spare_values}
    else:
        info = payload.batch.steps[payload.index]
        payload.batch.values[payload.index] = {
            **payload.batch.values[payload.index],
            **payload.spare,
        }
    info.extra = {**info.extra, "kept": list(dict.fromkeys(entry.reasons))}


def _part(places: list[_Place]) -> StepBatch:
    """Return some of one batch's steps."""
    batch, at = places[0].batch, [place.index for place in places]
    return replace(
        batch,
        steps=[batch.steps[i] for i in at],
        aggregates=batch.aggregates[at],
        samples=batch.samples[at],
        counts=None if batch.counts is None else batch.counts[at],
        ranges=None if batch.ranges is None else batch.ranges[at],
        values=[batch.values[i] for i in at],
        kpis=[batch.kpis[i] for i in at],
        new_slots=[],
        new_structures=[],
        documents={},
    )


def _trigger(spec: TriggerSpec) -> Trigger:
    if isinstance(spec, QuantileTrigger):
        return Quantile(spec)
    if isinstance(spec, SpikeTrigger):
        return Spike(spec)
    if isinstance(spec, FunctionTrigger):
        return Function(spec.target, spec.model_extra or {})
    return Nonfinite() if spec == "nonfinite" else Spike(SpikeTrigger(), name=spec)


def _needed(triggers: Iterable[Trigger], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statistics that triggers read, in stored order."""
    wanted = {name for trigger in triggers for name in trigger.statistics}
    return tuple(name for name in known if name in wanted or "*" in wanted)
