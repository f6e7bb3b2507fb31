"""Turn batches into the writes of one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from comgra_decl.errors import StoreError
from comgra_decl.records import ScalarBatch, StepBatch, StepInfo, Structure

from . import levels
from .blocks import BlockBuffer, RecordChunks, whole_blocks
from .commit import Commit
from .database import Database
from .dense import MISSING, Families, record_columns, runs_of, stack
from .layout import (
    LOGS,
    RECORDS_CHUNK,
    SHAPES_LIMIT,
    SLOTS_LIMIT,
    ArrayForm,
    RecordColumn,
    document_key,
    graph_key,
    round_up,
    standard_forms,
    step_key,
)
from .levels import SPAN, LevelReader, LevelTable, level_columns
from .location import Remote
from .logs import Facts, Log, Names, Stage, slot_row
from .meta import RunMeta
from .previews import preview_index
from .scalars import ScalarTable
from .values import ValueTable, array_of
from .view import View

_FILLS: dict[str, Any] = {"kpi": MISSING, "agg": float("nan"), "smp": float("nan"), "hist": 0}

Values = Sequence[dict[int, NDArray[Any]]]


class Contents:
    """The writer's state of a run: known slots, names, arrays, and the open block.

    `write` stages changes. `accept` makes them final after the commit has succeeded. `discard`
    reverts them, so that the same batches can be retried.
    """

    def __init__(self, database: Database, meta: RunMeta) -> None:
        self._db = database
        self._meta = meta
        self._logs = {name: Log(name) for name in LOGS}
        self._names = Names(self._logs["names"])
        self._values = ValueTable(self._logs["arrays"], self._logs["lanes"])
        self._facts = Facts()
        self._scalars = ScalarTable(self._names, bound=meta.bound)
        self._records = RecordChunks()
        stages: list[Stage] = [*self._logs.values(), self._names, self._values, self._facts]
        self._levels = LevelTable(level_columns(meta))
        self._stages = [*stages, self._scalars, self._records, self._levels]
        self._shapes: list[tuple[int, ...]] = []  # shape of each slot in the slot table
        self._forms: dict[str, ArrayForm] = {}
        self._handles: dict[str, ts.TensorStore] = {}
        self._created: dict[str, tuple[ArrayForm, ts.TensorStore]] = {}  # by the current commit
        self._blocks: BlockBuffer | None = None
        self._written: tuple[int, Families] | None = None

    @property
    def block_steps(self) -> int | None:
        """Records per block; None before the first commit."""
        return self._forms["kpi/blk"].chunk[0] if self._forms else None

    def write(
        self,
        commit: Commit,
        batches: Sequence[StepBatch],
        logged: Sequence[ScalarBatch],
        head: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Write everything except the head, and return the new head."""
        records = [batch for batch in batches if batch.steps]  # the others contain only documents
        if records:
            self._write_records(commit, int(head["n"]), records)
        for note in (note for part in logged for note in part.notes):
            self._logs["notes"].stage(list(note))
        return {
            **_advanced(head, batches),
            "documents": _write_documents(commit, batches, head),
            "scalars": self._scalars.write(commit, logged),
            "logs": {name: log.flush(commit) for name, log in self._logs.items()},
        }

    def _write_records(self, commit: Commit, first: int, batches: Sequence[StepBatch]) -> None:
        self._stage_slots(batches)
        blocks = self._blocks or self._stage_forms(commit)
        values = [by_slot for batch in batches for by_slot in batch.values]
        infos = [info for batch in batches for info in batch.steps]
        self._write_values(commit, first, _with_previews(values, infos))
        self._write_facts(commit, first, infos, values)
        families = self._families(first, batches)
        facts: dict[int, NDArray[np.float64]] = {}
        completed: list[tuple[int, NDArray[np.float32]]] = []
        for name, at, data in blocks.pieces(first, families):
            form = self._forms[name]
            if name == "kpi/blk":  # comes before the statistics
                facts[at] = data
            if name == "agg/blk" and SPAN % form.chunk[0] == 0:
                completed.append((at, data))
            if form.chunk[-1] < data.shape[-1] and len(data) > 1:
                data = _by_column(data)
            commit.write(self._array(form, commit), form, at, data)
        for name, at, data in self._records.pieces(first, families["kpi"]):
            form = self._forms[name]
            commit.write(self._array(form, commit), form, at, data)
        for at, data in sorted(completed, key=lambda piece: piece[0]):
            self._levels.add(commit, at, data, facts[at])
        self._written = first, families

    def finish(self, commit: Commit, head: Mapping[str, Any]) -> None:
        """Write what waits for further records."""
        rows = self._blocks.open_rows("agg") if self._blocks is not None else None
        if self._blocks is None or self.block_steps is None:
            return
        edge = int(head["n"]) // self.block_steps * self.block_steps
        facts = self._blocks.open_rows("kpi")
        if rows is None or facts is None:
            rows, facts = np.empty((0, 0, level_columns(self._meta)), np.float32), np.empty((0, 0))
        self._levels.finish(commit, edge, rows, facts)

    def resume(self, view: View, head: Mapping[str, Any]) -> None:
        """Restore the state of a resumed run.

        Args:
            view: view of all data below the run's head.
            head: head of the run.
        """
        tables = view.tables
        for name, log in self._logs.items():
            log.count = int(head["logs"].get(name, 0))
        self._names.resume(tables.names)
        self._scalars.resume(view.scalars)
        self._shapes = [slot.shape for slot in tables.slots]
        if not tables.forms:  # no records yet
            return
        raw = {name: form for name, form in tables.forms.items() if name.startswith("raw/")}
        self._values.resume(raw, tables.lanes)
        self._forms = {name: form for name, form in tables.forms.items() if name not in raw}
        self._handles = {
            name: self._db.array(form, cached=False) for name, form in tables.forms.items()
        }
        block = self._forms["kpi/blk"].chunk[0]
        self._blocks = self._new_blocks()
        families = [name.removesuffix("/row") for name in self._forms if name.endswith("/row")]
        self._blocks.resume(
            [
                {family: view.padded_row(family, record) for family in families}
                for record in range(view.n // block * block, view.n)
            ]
        )
        self._records.resume(view.records[view.n // RECORDS_CHUNK * RECORDS_CHUNK :])
        self._resume_levels(view, block)

    def _resume_levels(self, view: View, block: int) -> None:
        width = round_up(max(1, len(self._shapes)), self._forms["agg/row"].chunk[1])
        columns = level_columns(self._meta)
        if view.n >= levels.LONG:  # a shorter run has no open group
            self._levels.resume(LevelReader(self._db, view.records).restored(columns, width))
        if SPAN % block == 0:
            commit = Commit(self._db)  # of which nothing is written
            for at in range(view.n // SPAN * SPAN, view.n // block * block, block):
                rows = view.rows("agg", at, at + block)
                self._levels.add(commit, at, rows, view.records[at : at + block])
            self._levels.accept()

    def accept(self) -> None:
        """Mark the batches as written."""
        if self._written is not None:
            assert self._blocks is not None
            self._blocks.accept(*self._written)
        for name, (form, _) in self._created.items():
            # opened anew, because a transaction that succeeded despite an error keeps its handles
            self._handles[name] = self._db.array(form, cached=False)
        self._created.clear()
        for stage in self._stages:
            stage.accept()
        self._written = None

    def discard(self) -> None:
        """Revert the staged changes after a failed commit."""
        for stage in self._stages:
            stage.discard()
        self._created.clear()
        self._written = None
        if not self._logs["arrays"].count:
            self._forms.clear()
            self._blocks = None

    def _stage_slots(self, batches: Sequence[StepBatch]) -> None:
        known = self._logs["slots"].count
        new = {slot.id: slot for batch in batches for slot in batch.new_slots if slot.id >= known}
        for number in sorted(new):
            row = self._logs["slots"].stage(slot_row(new[number]))
            assert row == number, f"slot ids must be dense: got {number}, expected {row}"
        self._shapes[known:] = [new[number].shape for number in sorted(new)]
        if len(self._shapes) > SLOTS_LIMIT:
            raise StoreError(f"more than {SLOTS_LIMIT} slots; select fewer nodes.")

    def _stage_forms(self, commit: Commit) -> BlockBuffer:
        """Create the arrays at the first commit; the number of slots determines the chunks."""
        forms = standard_forms(
            slots=len(self._shapes),
            columns=len(self._meta.columns),
            samples=self._meta.sample_count,
            statistics=len(self._meta.statistics),
            bins=self._meta.bins,
            counts=self._meta.counts_dtype,
        )
        self._forms = {form.name: form for form in forms}
        for form in forms:
            self._logs["arrays"].stage(form.to_json())
            self._array(form, commit)
        self._blocks = self._new_blocks()
        return self._blocks

    def _new_blocks(self) -> BlockBuffer:
        block = self._forms["kpi/blk"].chunk[0]
        return BlockBuffer(block, _FILLS, gathers=isinstance(self._db.place, Remote))

    def _families(self, first: int, batches: Sequence[StepBatch]) -> Families:
        width = round_up(max(1, len(self._shapes)), self._forms["agg/row"].chunk[1])
        kpi = record_columns(batches, self._names)
        start, end = whole_blocks(first, len(kpi), self._forms["kpi/blk"].chunk[0])
        kpi[:, RecordColumn.WIDTH] = width
        kpi[:, RecordColumn.FACTS] = self._facts.first
        kpi[start - first : end - first, RecordColumn.FORM] = 1
        shapes = [self._shape_codes(batch) for batch in batches] if self._meta.tells_shapes else []
        return {"kpi": kpi, **stack(batches, shapes, width=width, meta=self._meta)}

    def _shape_codes(self, batch: StepBatch) -> NDArray[np.float32]:
        """Return the "shape" column of a batch's slots, [n]; see `RunMeta.columns`."""
        codes = np.zeros(len(batch.slots), np.float32)
        for at, (slot, shape) in enumerate(zip(batch.slots.tolist(), batch.shapes, strict=False)):
            if shape is not None and shape != self._shapes[slot]:
                code = 1 + self._names.code("shape", "x".join(map(str, shape)))
                codes[at] = code if code < SHAPES_LIMIT else np.nan
        return codes

    def _write_values(self, commit: Commit, first: int, values: Values) -> None:
        for piece in self._values.pieces(values):
            array = self._array(piece.form, commit)
            commit.write(array, piece.form, first + piece.offset, piece.data, piece.lane)

    def _write_facts(
        self, commit: Commit, first: int, infos: Sequence[StepInfo], values: Values
    ) -> None:
        facts = {
            "samples": runs_of([info.samples for info in infos]),
            "extra": runs_of([info.extra for info in infos]),
            "values": self._values.index(values),
        }
        if any(info.previews for info in infos):
            facts["previews"] = runs_of([preview_index(info.previews, array_of) for info in infos])
        if self._facts.stage(first, facts):
            commit.put_json(step_key(first), facts)

    def _array(self, form: ArrayForm, commit: Commit) -> ts.TensorStore:
        """Return the array within the commit, creating it on first use."""
        known = self._handles.get(form.name)
        if known is not None:
            return known.with_transaction(commit.transaction)
        if form.name not in self._created:
            created = self._db.array(form, create=True, transaction=commit.transaction)
            self._created[form.name] = form, created
        return self._created[form.name][1]


def _by_column(data: NDArray[Any]) -> NDArray[Any]:
    """Return a copy whose last dim varies slowest in memory.

    The chunks of a block contain one statistic each. They are then nearly contiguous, and it takes
    a fraction of the time to collect each of them twice: for its checksum and for compression.
    """
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(data, -1, 0)), 0, -1)


def _with_previews(values: Values, infos: Sequence[StepInfo]) -> Values:
    """Return everything to write into the arrays of values, [records]."""
    if not any(info.previews for info in infos):
        return values
    return [
        {**{slot: each.values for slot, each in info.previews.items()}, **by_slot}
        for info, by_slot in zip(infos, values, strict=True)
    ]


def _advanced(head: Mapping[str, Any], batches: Sequence[StepBatch]) -> dict[str, Any]:
    infos = [info for batch in batches for info in batch.steps]
    steps = [info.step for info in infos if info.mode == "train"]
    return {
        **head,
        "n": head["n"] + len(infos),
        "step": steps[-1] if steps else head["step"],
        "commits": head["commits"] + 1,
    }


def _write_documents(
    commit: Commit, batches: Sequence[StepBatch], head: Mapping[str, Any]
) -> dict[str, int]:
    """Write graphs and documents; return the documents' revisions."""
    revisions = dict(head["documents"])
    for batch in batches:
        for structure in batch.new_structures:
            commit.put_json(graph_key(structure.hash), _graph(structure))
        for name, document in batch.documents.items():
            revisions[name] = head["commits"] + 1
            commit.put_json(document_key(name), document, revision=revisions[name])
    return revisions


def _graph(structure: Structure) -> dict[str, Any]:
    return {
        "hash": structure.hash,
        "keys": [list(key) for key in structure.keys],
        "kinds": structure.kinds,
        "edges": [list(edge) for edge in structure.edges],
        "cuts": structure.cuts,
    }
