"""Writes a run: every commit is one atomic transaction that ends with `head`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, StoreError
from comgra_decl.records import StepBatch, Structure

from .blocks import BlockBuffer, whole_blocks
from .commit import Commit
from .database import Database, encode, new_context
from .dense import MISSING, Families, record_columns, runs_of, stack
from .layout import (
    HEAD_KEY,
    LOGS,
    MIN_READER,
    RUN_KEY,
    SLOTS_LIMIT,
    VERSION,
    ArrayForm,
    RecordColumn,
    document_key,
    graph_key,
    round_up,
    standard_forms,
    step_key,
)
from .logs import Facts, Log, Names, Stage, slot_row
from .meta import RunMeta, writer_identity
from .values import ValueTable

_NODE_CACHE = 16 << 20  # keeps index nodes, so that a commit does not read them again


class RunWriter:
    """The only writer of a run. Not thread-safe: one thread commits."""

    def __init__(self, database: Database, meta: RunMeta) -> None:
        """Use `create`."""
        self._db = database
        self._meta = meta
        self._pid = os.getpid()
        self._logs = {name: Log(name) for name in LOGS}
        self._names = Names(self._logs["names"])
        self._values = ValueTable(self._logs["arrays"], self._logs["lanes"])
        self._facts = Facts()
        self._stages: list[Stage] = [
            *self._logs.values(),
            self._names,
            self._values,
            self._facts,
        ]
        self._forms: dict[str, ArrayForm] = {}
        self._handles: dict[str, ts.TensorStore] = {}
        self._created: dict[str, ts.TensorStore] = {}  # exist only in the transaction under way
        self._slots = 0
        self._blocks: BlockBuffer | None = None
        self._head: dict[str, Any] = {}
        self._head_bytes: bytes | None = None
        self._closed = False

    @classmethod
    def create(cls, path: str | os.PathLike[str], meta: RunMeta) -> RunWriter:
        """Creates the run in folder `path`, which may exist but not hold a run.

        Raises:
            StoreError: there is a run already, or the folder cannot be written.
        """
        meta.writer = writer_identity()
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot create the run's folder: {error}") from error
        writer = cls(Database(path, new_context(cache_bytes=_NODE_CACHE)), meta)
        writer._create()
        return writer

    @property
    def records(self) -> int:
        """Number of records committed."""
        return int(self._head["n"])

    @property
    def block_steps(self) -> int | None:
        """Records per block; None before the first commit."""
        return self._forms["kpi/blk"].chunk[0] if self._forms else None

    def commit(self, batches: Sequence[StepBatch]) -> None:
        """Stores the batches, all or nothing, durably.

        Raises:
            TransientStoreError: the disk is full or the store away; nothing was stored and the
                same call may be repeated.
            StoreError: it cannot work (another writer, no permission, damage).
        """
        self._check_usable()
        batches = [batch for batch in batches if batch.steps]
        if not batches:
            return
        try:
            with self._db.writing(f"the commit after record {self.records}"):
                families = self._write(batches)
        except BaseException:
            self._discard()
            raise
        self._accept(families)

    def close(self, *, error: str | None = None) -> None:
        """Marks the run as finished, or as stopped by `error`; again: does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._db.writing("the end of the run"):
            end = {"closed": True, "error": error, "time": time.time()}
            self._finish(self._begin(), {**self._head, **end})
        self._closed = True
        self._handles.clear()

    # -- one transaction

    def _create(self) -> None:
        with self._db.writing("a new run"):
            commit = Commit(self._db)
            if commit.read(RUN_KEY) is not None:
                raise StoreError(
                    f"{self._db.path} already holds a run; runs are never overwritten. "
                    "Choose another run.name or run.root."
                )
            commit.put(RUN_KEY, encode(self._meta.to_json()))
            self._finish(commit, self._first_head())

    def _first_head(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "min_reader": MIN_READER,
            "uuid": self._meta.uuid,
            "n": 0,
            "closed": False,
            "error": None,
            "time": time.time(),
            "step": None,
            "commits": 0,
            "documents": {},
            "logs": dict.fromkeys(LOGS, 0),
        }

    def _begin(self) -> Commit:
        """Starts a commit, fenced: it fails if anyone else has committed meanwhile."""
        commit = Commit(self._db)
        if commit.read(HEAD_KEY) != self._head_bytes:
            raise StoreError(f"{self._db.path}: another writer has changed this run; stopping.")
        return commit

    def _finish(self, commit: Commit, head: dict[str, Any]) -> None:
        encoded = encode(head)
        commit.put(HEAD_KEY, encoded)
        try:
            commit.finish()
        except Exception:
            if not self._landed(encoded):
                raise
        self._head, self._head_bytes = head, encoded

    def _landed(self, head: bytes) -> bool:
        """Whether a commit that reported an error is there nevertheless (a late fsync failed)."""
        try:
            return self._db.read_bytes(HEAD_KEY) == head
        except ComgraError:
            return False

    def _write(self, batches: Sequence[StepBatch]) -> Families:
        commit = self._begin()
        self._stage_slots(batches)
        self._stage_forms()
        for form in self._forms.values():
            self._bound(form, commit)
        values = [by_slot for batch in batches for by_slot in batch.values]
        for piece in self._values.pieces(values):
            first = self.records + piece.offset
            commit.write(self._bound(piece.form, commit), first, piece.data, piece.lane)
        self._write_facts(commit, batches, values)
        families = self._families(batches)
        self._write_families(commit, families)
        self._write_documents(commit, batches)
        self._finish(commit, self._next_head(commit, batches))
        return families

    def _next_head(self, commit: Commit, batches: Sequence[StepBatch]) -> dict[str, Any]:
        infos = [info for batch in batches for info in batch.steps]
        steps = [info.step for info in infos if info.mode == "train"]
        revisions = dict(self._head["documents"])
        for batch in batches:
            for name in batch.documents:
                revisions[name] = self._head["commits"] + 1
        return {
            **self._head,
            "n": self.records + len(infos),
            "time": time.time(),
            "step": steps[-1] if steps else self._head["step"],
            "commits": self._head["commits"] + 1,
            "documents": revisions,
            "logs": {name: log.flush(commit) for name, log in self._logs.items()},
        }

    # -- its parts

    def _stage_slots(self, batches: Sequence[StepBatch]) -> None:
        known = self._logs["slots"].count
        new = {slot.id: slot for batch in batches for slot in batch.new_slots if slot.id >= known}
        for number in sorted(new):
            row = self._logs["slots"].stage(slot_row(new[number]))
            assert row == number, f"slot ids must be dense: got {number}, expected {row}"
        self._slots = known + len(new)
        if self._slots > SLOTS_LIMIT:
            raise StoreError(f"more than {SLOTS_LIMIT} slots; select fewer nodes.")

    def _stage_forms(self) -> None:
        """Chooses the arrays' chunks at the first commit, when the number of slots is known."""
        if self._forms:
            return
        forms = standard_forms(
            slots=self._slots,
            columns=len(self._meta.columns),
            samples=self._meta.sample_count,
            statistics=len(self._meta.statistics),
            bins=self._meta.bins,
            counts=self._meta.counts_dtype,
        )
        self._forms = {form.name: form for form in forms}
        for form in forms:
            self._logs["arrays"].stage(form.to_json())

    def _families(self, batches: Sequence[StepBatch]) -> Families:
        width = round_up(max(1, self._slots), self._forms["agg/row"].chunk[1])
        families = {
            "kpi": record_columns(batches, self._names),
            **stack(batches, width=width, meta=self._meta),
        }
        first, count = self.records, len(families["kpi"])
        start, end = whole_blocks(first, count, self._forms["kpi/blk"].chunk[0])
        families["kpi"][:, RecordColumn.WIDTH] = width
        families["kpi"][:, RecordColumn.FACTS] = self._facts.first
        families["kpi"][start - first : end - first, RecordColumn.FORM] = 1
        return families

    def _write_families(self, commit: Commit, families: Families) -> None:
        if self._blocks is None:
            fills = {"kpi": MISSING, "agg": float("nan"), "smp": float("nan"), "hist": 0}
            self._blocks = BlockBuffer(self._forms["kpi/blk"].chunk[0], fills)
        for name, first, data in self._blocks.pieces(self.records, families):
            commit.write(self._bound(self._forms[name], commit), first, data)

    def _bound(self, form: ArrayForm, commit: Commit) -> ts.TensorStore:
        """Returns the array within the commit, creating it at its first use."""
        known = self._handles.get(form.name)
        if known is not None:
            return known.with_transaction(commit.transaction)
        if form.name not in self._created:
            created = self._db.array(form, create=True, transaction=commit.transaction)
            self._created[form.name] = created
        return self._created[form.name]

    def _write_facts(
        self, commit: Commit, batches: Sequence[StepBatch], values: Sequence[dict[int, Any]]
    ) -> None:
        infos = [info for batch in batches for info in batch.steps]
        facts = {
            "samples": runs_of([info.samples for info in infos]),
            "extra": runs_of([info.extra for info in infos]),
            "values": self._values.index(values),
        }
        if self._facts.stage(self.records, facts):
            commit.put(step_key(self.records), encode(facts))

    def _write_documents(self, commit: Commit, batches: Sequence[StepBatch]) -> None:
        for batch in batches:
            for structure in batch.new_structures:
                commit.put(graph_key(structure.hash), encode(_graph(structure)))
            for name, document in batch.documents.items():
                commit.put(document_key(name), encode(document))

    # -- after it

    def _accept(self, families: Families) -> None:
        assert self._blocks is not None
        self._blocks.accept(self.records - len(families["kpi"]), families)
        for name, created in self._created.items():
            self._handles[name] = created.with_transaction(None)
        self._created.clear()
        for part in self._stages:
            part.accept()

    def _discard(self) -> None:
        for part in self._stages:
            part.discard()
        self._created.clear()
        if not self._logs["arrays"].count:
            self._forms.clear()
            self._blocks = None

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("a forked child cannot write to its parent's run.")
        if self._closed:
            raise StoreError(f"{self._db.path}: the run is closed.")


def _graph(structure: Structure) -> dict[str, Any]:
    return {
        "hash": structure.hash,
        "keys": [list(key) for key in structure.keys],
        "kinds": structure.kinds,
        "edges": [list(edge) for edge in structure.edges],
        "cuts": structure.cuts,
    }
