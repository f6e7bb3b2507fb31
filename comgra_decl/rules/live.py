"""The rules of a run during recording: called and evaluated on the writer thread."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import MissingPackageError
from comgra_decl.records import (
    PROBE_MODE,
    RESUMED,
    SKIPPED_STEP,
    ScalarBatch,
    SlotInfo,
    StepBatch,
)
from comgra_decl.rules.catalogue import build
from comgra_decl.rules.diagnosis import feed
from comgra_decl.rules.engine import DOCUMENTS, Engine
from comgra_decl.rules.finding import Finding, consequences_of
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Numbers, Window

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")

DOCUMENT = "findings"
"""The document with the findings, and with the rules that could not check the run."""

_INTERVAL = 1.0
"""Minimum number of seconds between two evaluations of the findings."""

_REFRESH = 10.0
"""Number of seconds after which the checklist values are stored again.

The values change at every step. Without this limit, a new document would be stored every second.
"""

_SHARE = 0.01
"""Maximum share of time for evaluating the findings."""

_MOST_WITHDRAWN = 3
"""Maximum number of times that a rule's finding is withdrawn and reported again. After that, the
finding is only stored.
"""


class Act(Protocol):
    """Receives new and withdrawn findings, on the writer thread."""

    def __call__(self, finding: Finding, explains: Sequence[Finding] = ()) -> None:
        """Receive a new finding, and those that it explains."""

    def withdraw(self, finding: Finding, step: int) -> None:
        """Receive a reported finding that no longer holds at `step`."""


class LiveRules:
    """Passes every record and metric of a run to the rules, on the writer thread.

    An error in a rule is reported once and disables that rule. An error in comgra_decl itself
    disables all rules. Recording always continues.

    Args:
        spec: the spec of the run.
        act: receives each new finding, and each reported finding that no longer holds, on the
            writer thread.
    """

    def __init__(self, spec: Spec, *, act: Act) -> None:
        self._engine = Engine(build(spec.rules, trust=True), spec.statistics)
        self._takes_metrics = not spec.kpis.loss
        self._act = act
        self._known: set[tuple[str, object]] = set()
        self._standing: dict[str, Finding] = {}  # reported ones, by rule
        self._withdrawn: Counter[str] = Counter()  # number of times, by rule
        self._document: dict[str, Any] | None = None
        self._found: dict[str, Any] | None = None  # its findings, without readings
        self._refreshed = -math.inf
        self._past: Callable[[], Run] | None = None
        self._resumes: int | None = None  # step at which a resumed run continues
        self._unpublished: dict[str, Any] = {}
        self._fired = 0
        self._due = 0.0
        self._records = 0
        self._failed = False
        self.seconds = 0.0
        """Time spent on rules, in seconds."""

    def resume(self, slots: Sequence[SlotInfo], past: Callable[[], Run]) -> None:
        """Prepare for a resumed run.

        Args:
            slots: the existing slots of the run.
            past: opens the existing records, which the rules check before any new ones.
        """
        self._engine.add_slots(slots)
        self._past = past

    def take(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Check the next records; adds new findings to their documents."""
        self._safely(lambda: self._take(batches))
        return batches

    def _take(self, batches: list[StepBatch]) -> None:
        self._look_at(batches)
        if batches and time.monotonic() >= self._due:
            batches[-1].documents.update(self._conclude())

    def watch(self, batches: list[StepBatch]) -> None:
        """Check the next records immediately if findings determine which steps are stored.

        New findings are added to the documents by `publish`.
        """
        self._safely(lambda: self._watch(batches))

    def _watch(self, batches: list[StepBatch]) -> None:
        self._look_at(batches)
        fired = self._engine.fired()
        if fired != self._fired or time.monotonic() >= self._due:
            self._fired = fired
            self._unpublished.update(self._conclude())

    def publish(self, batches: list[StepBatch]) -> list[StepBatch]:
        """Add the findings of `watch` to the records' documents."""
        if batches and self._unpublished:
            batches[-1].documents.update(self._unpublished)
            self._unpublished = {}
        return batches

    def attach(self, said: ScalarBatch) -> None:
        """Pass metrics to the rules once the metrics are final."""
        if self._past is not None:
            resumed = [note.step for note in said.notes if note.type == RESUMED]
            self._resumes = resumed[0] if resumed else self._resumes
        settle = said.settle

        def settled() -> None:
            if settle is not None:
                settle()
            self._safely(lambda: self._take_numbers(said))

        said.settle = settled

    def look_at_numbers(self, said: ScalarBatch) -> None:
        """Pass final metrics to the rules, on the writer thread."""
        self._safely(lambda: self._take_numbers(said))

    def close(self, late: Mapping[str, Any]) -> list[StepBatch]:
        """Return a batch that contains only the last findings, if they are new.

        Args:
            late: the documents that changed after the last record.
        """
        last: list[StepBatch] = []
        self._safely(lambda: last.extend(self._last(late)))
        return last

    def _last(self, late: Mapping[str, Any]) -> list[StepBatch]:
        self._add_documents(late)
        self._engine.end()
        documents = {**self._unpublished, **self._conclude()}
        return [StepBatch.of_documents(documents)] if documents else []

    def _safely(self, work: Callable[[], None]) -> None:
        """Call and time a function; an internal error only disables the rules."""
        if self._failed:
            return
        began = time.perf_counter()
        try:
            work()
        except Exception as error:  # noqa: BLE001
            _log.error("comgra: rules were switched off because of an error", exc_info=error)
            self._failed = True
        self.seconds += time.perf_counter() - began

    def _catch_up(self, batches: Sequence[StepBatch] = ()) -> None:
        """Pass the existing records to the rules once the valid ones are known."""
        past = self._past
        steps = [info.step for batch in batches for info in batch.steps if info.mode == "train"]
        resumes = self._resumes if self._resumes is not None or not steps else steps[0]
        if past is None or resumes is None:
            return
        self._past = None
        try:
            run = past()
            feed(self._engine, run, until=resumes)
            for finding in (run.document(DOCUMENT) or {"findings": []})["findings"]:
                self._known.add(_key(Finding.from_json(finding)))  # reported already
        except MissingPackageError as error:
            _log.warning("comgra: the rules start over, because to read earlier records, %s", error)
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "comgra: earlier records cannot be read, so the rules start over; "
                "`comgra-decl diagnose` checks the whole run",
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
        self._add_documents(batch.documents)
        if any(info.mode != PROBE_MODE for info in batch.steps):  # a batch has only one mode
            engine.look(window_of(batch, engine, first=self._records))
            self._records += len(batch.steps)
            if self._takes_metrics:
                self._take_metrics(batch)

    def _add_documents(self, documents: Mapping[str, Any]) -> None:
        for name in DOCUMENTS:
            if name in documents:
                self._engine.add_document(name, documents[name])

    def _take_numbers(self, said: ScalarBatch) -> None:
        self._catch_up()
        pairs = list(zip(said.names, said.types, strict=True))
        for name, type_ in dict.fromkeys(pairs):
            at = np.array([i for i, pair in enumerate(pairs) if pair == (name, type_)])
            self._engine.look_at_numbers(Numbers(name, type_, said.steps[at], said.values[at]))

    def _take_metrics(self, batch: StepBatch) -> None:
        for info, kpis in zip(batch.steps, batch.kpis, strict=True):
            for name, value in kpis.items():
                step, number = np.array([info.step]), np.array([value], np.float64)
                self._engine.look_at_numbers(Numbers(name, info.type, step, number))

    def _withdraw(self, found: Collection[str]) -> None:
        """Withdraws reported findings that no longer hold."""
        for rule in [rule for rule in self._standing if rule not in found]:
            finding = self._standing.pop(rule)
            self._act.withdraw(finding, self._engine.scene.last_step)
            self._withdrawn[rule] += 1
            if self._withdrawn[rule] < _MOST_WITHDRAWN:  # reported as new if the finding returns
                self._known = {key for key in self._known if key[0] != rule}

    def _conclude(self) -> dict[str, Any]:
        """Evaluate the findings and return the document if it has changed."""
        began = time.perf_counter()
        findings = self._engine.findings()
        for finding in findings:
            if _key(finding) not in self._known:
                self._known.add(_key(finding))
                self._act(finding, consequences_of(finding, findings))
            if finding.because is None and self._withdrawn[finding.rule] < _MOST_WITHDRAWN:
                self._standing[finding.rule] = finding
        self._withdraw({finding.rule for finding in findings})
        document = {
            "findings": [finding.to_json() for finding in findings],
            "unchecked": {entry.rule: entry.reason for entry in self._engine.unchecked()},
        }
        now = time.monotonic()
        ended = self._engine.scene.ended
        if document != self._found or ended or now >= self._refreshed + _REFRESH:
            self._found, self._refreshed = document, now
            readings = {name: r.to_json() for name, r in self._engine.readings().items()}
            document = {**document, "readings": readings, "caveats": self._engine.caveats()}
            changed = document != self._document
            self._document = document
        else:
            changed = False
        took = time.perf_counter() - began
        self._due = time.monotonic() + max(_INTERVAL, took / _SHARE)
        return {DOCUMENT: document} if changed else {}


def _key(finding: Finding) -> tuple[str, object]:
    """Return the key of a finding: its rule and its severity. The severity may rise later."""
    return finding.rule, finding.weight


@dataclass(frozen=True)
class _Details:
    """Part of a batch that concerns individual slots."""

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
    """Return the records of a batch as a window."""
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
        facts=[info.extra for info in batch.steps],
    )


def _shapes(
    batch: StepBatch, table: SlotTable
) -> tuple[list[tuple[int, ...]], NDArray[np.float32] | None]:
    """Return the shapes that differ from the slot table, and `Window.shape_codes`."""
    known: dict[tuple[int, ...], int] = {}
    line: NDArray[np.float32] | None = None
    for slot, shape in zip(batch.slots.tolist(), batch.shapes, strict=False):
        if shape is not None and shape != table.infos[slot].shape:
            line = np.zeros(len(table), np.float32) if line is None else line
            line[slot] = 1 + known.setdefault(shape, len(known))
    codes = None if line is None else np.broadcast_to(line, (len(batch.steps), len(line)))
    return list(known), codes
