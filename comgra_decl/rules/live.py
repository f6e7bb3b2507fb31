"""The rules of a run while it is being recorded: fed on the writer thread, and acted upon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import RESUMED, SKIPPED_STEP, Said, SlotInfo, StepBatch
from comgra_decl.rules.catalogue import build
from comgra_decl.rules.diagnosis import feed
from comgra_decl.rules.engine import Engine
from comgra_decl.rules.finding import Finding
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Numbers, Window

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")

DOCUMENT = "findings"
"""Name of the document that holds what was found, and what could not be looked at."""

_INTERVAL = 1.0
"""Least seconds between two times that findings are worked out."""

_SHARE = 0.02
"""Of the time, working them out takes at most so much."""

Act = Callable[[Finding], None]


class LiveRules:
    """Shows every record and number of a run to the rules, on the writer thread.

    A fault of a rule or of ours is reported once and ends the looking, never the recording.

    Args:
        spec: of the run.
        act: told of each new finding, on the writer thread.
    """

    def __init__(self, spec: Spec, *, act: Act) -> None:
        self._engine = Engine(build(spec.rules, trust=True), spec.statistics)
        self._hears_records = not spec.kpis.loss
        self._act = act
        self._known: set[tuple[str, object]] = set()
        self._document: dict[str, Any] | None = None
        self._past: Callable[[], Run] | None = None
        self._goes_on: int | None = None  # with which step a resumed training does
        self._unpublished: dict[str, Any] = {}
        self._fired = 0
        self._due = 0.0
        self._records = 0
        self._failed = False
        self.seconds = 0.0
        """Time that all of this has taken."""

    def resume(self, slots: Sequence[SlotInfo], past: Callable[[], Run]) -> None:
        """Learns of the slots of a run that goes on.

        Args:
            slots: those that it has.
            past: opens what was recorded of it, which the rules look at before anything new.
        """
        self._engine.add_slots(slots)
        self._past = past

    def take(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Takes the next records; puts what was found into the documents that they bring."""
        self._safely(lambda: self._take(batches))
        return batches

    def _take(self, batches: list[StepBatch]) -> None:
        self._look_at(batches)
        if batches and time.monotonic() >= self._due:
            batches[-1].documents.update(self._conclude())

    def watch(self, batches: list[StepBatch]) -> None:
        """Takes the next records where a finding may decide what is stored: it acts at once.

        What was found is put into the documents by `publish`.
        """
        self._safely(lambda: self._watch(batches))

    def _watch(self, batches: list[StepBatch]) -> None:
        self._look_at(batches)
        fired = self._engine.fired()
        if fired != self._fired or time.monotonic() >= self._due:
            self._fired = fired
            self._unpublished.update(self._conclude())

    def publish(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Puts what `watch` has found into the documents that records bring."""
        if batches and self._unpublished:
            batches[-1].documents.update(self._unpublished)
            self._unpublished = {}
        return batches

    def attach(self, said: Said) -> None:
        """Makes what is said of steps be heard once it is settled."""
        if self._past is not None:
            resumed = [note.step for note in said.notes if note.type == RESUMED]
            self._goes_on = resumed[0] if resumed else self._goes_on
        settle = said.settle

        def heard() -> None:
            if settle is not None:
                settle()
            self._safely(lambda: self._hear(said))

        said.settle = heard

    def close(self) -> list[StepBatch]:
        """Returns a batch without records that holds what was found at last, if that is news."""
        last: list[StepBatch] = []
        self._safely(lambda: last.extend(self._last()))
        return last

    def _last(self) -> list[StepBatch]:
        documents = {**self._unpublished, **self._conclude()}
        return [StepBatch.of_documents(documents)] if documents else []

    def _safely(self, work: Callable[[], None]) -> None:
        """Does something, and measures it; a fault of ours ends all of this, not the recording."""
        if self._failed:
            return
        began = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001
            _log.error("comgra: the rules have stopped because of an error", exc_info=error)
            self._failed = True
        self.seconds += time.perf_counter() - began

    def _catch_up(self, batches: Sequence[StepBatch] = ()) -> None:
        """Looks at what the run holds already; waits until it is known how much of that counts."""
        past = self._past
        steps = [info.step for batch in batches for info in batch.steps if info.mode == "train"]
        goes_on = self._goes_on if self._goes_on is not None or not steps else steps[0]
        if past is None or goes_on is None:
            return
        self._past = None
        try:
            run = past()
            feed(self._engine, run, until=goes_on)
            for finding in (run.document(DOCUMENT) or {"findings": []})["findings"]:
                self._known.add(_key(Finding.from_json(finding)))  # it was said before
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "comgra: what was recorded before cannot be read, so the rules begin anew; "
                "`comgra-decl diagnose` looks at all of it",
                exc_info=error,
            )

    def _look_at(self, batches: Sequence[StepBatch]) -> None:
        self._catch_up(batches)
        for batch in batches:
            self._look(batch)

    def _look(self, batch: StepBatch) -> None:
        engine = self._engine
        engine.add_slots(batch.new_slots)
        for structure in batch.new_structures:
            engine.add_structure(structure)
        for name in ("modules", "report"):
            if name in batch.documents:
                engine.add_document(name, batch.documents[name])
        if batch.steps:
            engine.look(window_of(batch, engine, first=self._records))
            self._records += len(batch.steps)
            if self._hears_records:
                self._hear_records(batch)

    def _hear(self, said: Said) -> None:
        self._catch_up()
        pairs = list(zip(said.names, said.types, strict=True))
        for name, type_ in dict.fromkeys(pairs):
            at = np.array([i for i, pair in enumerate(pairs) if pair == (name, type_)])
            self._engine.look_at_numbers(Numbers(name, type_, said.steps[at], said.values[at]))

    def _hear_records(self, batch: StepBatch) -> None:
        for info, kpis in zip(batch.steps, batch.kpis, strict=True):
            for name, value in kpis.items():
                step, number = np.array([info.step]), np.array([value], np.float64)
                self._engine.look_at_numbers(Numbers(name, info.type, step, number))

    def _conclude(self) -> dict[str, Any]:
        """Works out what was found; returns the document if it is another one."""
        began = time.perf_counter()
        findings = self._engine.findings()
        for finding in findings:
            key = _key(finding)
            if key not in self._known:
                self._known.add(key)
                self._act(finding)
        document = {
            "findings": [finding.to_json() for finding in findings],
            "unchecked": {entry.rule: entry.reason for entry in self._engine.unchecked()},
        }
        took = time.perf_counter() - began
        self._due = time.monotonic() + max(_INTERVAL, took / _SHARE)
        if document == self._document:
            return {}
        self._document = document
        return {DOCUMENT: document}


def _key(finding: Finding) -> tuple[str, object]:
    """Returns what makes a finding news: a rule has one at a time, which may become worse."""
    return finding.rule, finding.severity


@dataclass(frozen=True)
class _Details:
    """What a batch holds of single slots."""

    batch: StepBatch
    columns: dict[int, int]

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        batch, at = self.batch, self.columns.get(slot)
        if batch.counts is None or batch.ranges is None:
            return None
        if at is None:
            k, _, bins = batch.counts.shape
            return np.zeros((k, bins), np.uint32), np.full((k, 2), np.nan, np.float32)
        return batch.counts[:, at], batch.ranges[:, at]

    def samples(self, slot: int) -> NDArray[Any] | None:
        at = self.columns.get(slot)
        return None if at is None or not self.batch.samples.shape[2] else self.batch.samples[:, at]

    def values(self, row: int, slot: int) -> NDArray[Any] | None:
        return self.batch.values[row].get(slot)


def window_of(batch: StepBatch, engine: Engine, *, first: int) -> Window:
    """Returns the records of a batch as rules see them."""
    table = engine.scene.table
    slots, count = batch.slots, len(table)
    aggregates = batch.aggregates
    if len(slots) != count or not np.array_equal(slots, np.arange(count)):
        aggregates = np.full((len(batch.steps), count, *aggregates.shape[2:]), np.nan, np.float32)
        aggregates[:, slots] = batch.aggregates
    shapes, codes = _shapes(batch, table)
    return Window(
        table=table,
        statistics=engine.scene.statistics,
        first=first,
        steps=np.array([info.step for info in batch.steps], np.int64),
        types=[info.type for info in batch.steps],
        train=np.array([info.mode == "train" for info in batch.steps], np.bool_),
        aggregates=aggregates,
        details=_Details(batch, {slot: at for at, slot in enumerate(slots.tolist())}),
        structures=[info.structure for info in batch.steps],
        histograms=batch.counts is not None,
        skipped=np.array([SKIPPED_STEP in info.extra for info in batch.steps], np.bool_),
        shape_codes=codes,
        shapes=shapes,
    )


def _shapes(
    batch: StepBatch, table: SlotTable
) -> tuple[list[tuple[int, ...]], NDArray[np.float32] | None]:
    """Returns the shapes that are not those of the slot table, and `Window.shape_codes`."""
    known: dict[tuple[int, ...], int] = {}
    line: NDArray[np.float32] | None = None
    for slot, shape in zip(batch.slots.tolist(), batch.shapes, strict=False):
        if shape is not None and shape != table.infos[slot].shape:
            line = np.zeros(len(table), np.float32) if line is None else line
            line[slot] = 1 + known.setdefault(shape, len(known))
    codes = None if line is None else np.broadcast_to(line, (len(batch.steps), len(line)))
    return list(known), codes
