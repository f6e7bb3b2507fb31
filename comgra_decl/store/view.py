"""A consistent view of a run: all reads are limited to records below the view's `head.n`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import Note, SlotInfo, SlotKey, StoredPreview, Structure

from .database import Database
from .documents import check_document
from .layout import (
    RECORDS_ARRAY,
    SYSTEM_COLUMNS,
    RecordColumn,
    document_key,
    graph_key,
    step_key,
)
from .levels import Extremes, LevelReader
from .meta import RunMeta
from .parts import Part, cut
from .plausible import check_depth, check_edges, check_facts, check_records
from .previews import find_preview
from .salvage import Salvage, TooLargeError, reserve
from .scalars import LOST as LOST_SCALAR
from .scalars import ScalarReader
from .sessions import Session, read_sessions, superseded
from .sums import SumsReader
from .surviving import LOST, FactsReader
from .tables import WRONG, Tables

Index = tuple[int | slice, ...]
T = TypeVar("T")

_log = logging.getLogger("comgra_decl")


class View:
    """Reads the first `n` records. Immutable, thread-safe."""

    def __init__(
        self,
        db: Database,
        meta: RunMeta,
        tables: Tables,
        head: Mapping[str, Any],
        bound: float,
        *,
        scalars: ScalarReader,
        sums: SumsReader | None,
    ) -> None:
        self.meta = meta
        self.n = int(head["n"])
        self._db = db
        self._tables = tables
        self._bound = bound
        self._manifest: tuple[int, int, int] | None = None
        self._scalar_count = int(head.get("scalars", 0))  # older runs have none
        self._scalars = scalars
        self.sums = sums
        """Compares chunks with their checksums; None for format version 2."""
        self._head_sessions = head.get("sessions", [])
        self._documents: Mapping[str, int] = head["documents"]
        self._handles: dict[tuple[str, bool], ts.TensorStore] = {}  # by name and whether cached
        self._facts = lru_cache(maxsize=64)(_of_weak(self._read_facts))
        self._salvage = self._new_salvage()
        self._levels: LevelReader | None = None
        self._looked = False

    @property
    def tables(self) -> Tables:
        """Lookup tables of the view; must not be changed."""
        return self._tables

    @property
    def documents(self) -> list[str]:
        """Names of all documents."""
        return list(self._documents)

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots, by id."""
        return self._tables.slots

    @property
    def records(self) -> NDArray[np.float64]:
        """Numeric facts [n, SYSTEM_COLUMNS] of all records; see `RecordColumn`."""
        return self._tables.records

    @property
    def scalars(self) -> NDArray[np.void]:
        """All scalars in logging order; fields as in `scalars.ROW`."""
        return self._scalars.rows(self._scalar_count)

    @property
    def notes(self) -> list[Note]:
        """All notes, in order."""
        return self._tables.notes

    @property
    def damage(self) -> list[str]:
        """Damaged parts encountered so far, all of which are left out; empty if there are none."""
        return list(dict.fromkeys([*self._tables.damage, *self._scalars.damage]))

    def look_for_damage(self) -> None:
        """Read all documents, so that `damage` lists the damaged ones."""
        if not self._looked:
            for name, revision in self._documents.items():
                self._look_at(document_key(name), revision, partial(self.document, name))
            self._looked = True

    def _look_at(self, key: str, revision: int, read: Callable[[], object]) -> None:
        """Read a key unless an earlier view of the same run found it intact."""
        intact = self._tables.intact
        if (key, revision) not in intact and read() is not None:
            intact.add((key, revision))

    @cached_property
    def sessions(self) -> list[Session]:
        """Programs that wrote the run, in order; more than one if it was resumed."""
        return read_sessions(self._head_sessions, self.notes)

    @cached_property
    def superseded(self) -> NDArray[np.bool_]:
        """Mask [n] of the records to ignore.

        They are ignored because a later session repeated their steps, or because damage destroyed
        their facts.
        """
        steps = self.records[:, RecordColumn.STEP]
        modes = self.names("mode")
        train = modes.index("train") if "train" in modes else -1
        trained: NDArray[np.bool_] = self.records[:, RecordColumn.MODE] == train
        again = superseded(steps, trained, [(s.record, s.step) for s in self.sessions])
        lost: NDArray[np.bool_] = steps == LOST
        return again | lost

    @cached_property
    def superseded_scalars(self) -> NDArray[np.bool_]:
        """Mask of the scalars to ignore: superseded by a later session, or damaged."""
        steps: NDArray[np.float64] = self.scalars["step"].astype(np.float64)
        trained = np.ones(len(steps), bool)
        again = superseded(steps, trained, [(s.scalar, s.step) for s in self.sessions])
        lost: NDArray[np.bool_] = self.scalars["step"] == LOST_SCALAR
        return again | lost

    def names(self, table: str) -> list[str]:
        """Return the names in a table ("type", "tags", "scalar", ...), by code."""
        return self._tables.names.get(table, [])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Tensor shapes that differ from the slot table; see `shape`."""
        return self._tables.shapes

    @property
    def reshaped(self) -> bool:
        """Whether any record has a tensor shape that differs from the slot table."""
        return bool(self.shapes)

    def shape(self, slot: int, code: float) -> tuple[int, ...] | None:
        """Return the shape of a slot in a record, given its value in the "shape" column.

        None if the slot is not in the record, or if the shape is unknown.
        """
        if code == 0:
            return self.slots[slot].shape
        known = 1 <= code <= len(self.shapes)
        return self.shapes[int(code) - 1] if known else None

    def load_records(self) -> NDArray[np.float64]:
        """Read the facts of records that are not yet in the tables; return all facts."""
        known = self._tables.records
        columns = slice(0, SYSTEM_COLUMNS)

        def read(name: str, where: slice) -> NDArray[np.float64]:
            # The chunks of `records` are read once, and would fill the cache.
            return self._read(name, where, columns, cached=name != RECORDS_ARRAY)

        reader, at = FactsReader(read, self._block), 0
        new = np.empty((self.n - len(known), SYSTEM_COLUMNS))
        for part in reader.facts(len(known), self.n):
            new[at : at + len(part)] = part
            at += len(part)
        try:
            check_records(new, self._tables.names, self.n)
        except ValueError as error:
            raise DamagedRunError(f"{self._db.path}: {error}") from error
        self._tables.records = np.concatenate([known, new]) if len(known) else new
        self._tables.damage += reader.damage
        self._salvage = self._new_salvage()
        return self._tables.records

    # -- statistics

    def row(self, family: str, record: int, *inner: int | slice) -> NDArray[Any]:
        """Return the array that a record stores for a family, or the part selected by `inner`.

        The whole array is [width, ...].

        Slots from `width` on did not exist when the record was written. Damaged parts of statistics
        are NaN.

        Raises:
            DamagedRunError: Everything is damaged, or part of the histogram counts is damaged,
                because counts cannot be NaN.
        """
        self._refuse_lost(record)
        form = "blk" if self.records[record, RecordColumn.FORM] else "row"
        rest = inner or (slice(0, int(self.records[record, RecordColumn.WIDTH])),)
        try:
            return self._read(f"{family}/{form}", record, *rest)
        except TooLargeError:
            raise
        except DamagedRunError:
            form = "blk" if record < self.n // self._block * self._block else "row"
            where = slice(record, record + 1), *rest
            found: NDArray[Any] = self._salvage.read(f"{family}/{form}", *where)[0]
            lost = self._salvage.lost(family, *where)
            if lost is not None and (lost.all() or found.dtype.kind != "f"):
                raise
            return found

    def lost(self, family: str, slot: int) -> NDArray[np.bool_] | None:
        """Return a mask [n] of a slot's damaged records; None if there are none.

        Covers the data read so far by `series`, `heat` and `rows`, which return fill values for
        damaged records.
        """
        lost = self._salvage.lost(family, slice(0, self.n), slot)
        return None if lost is None else np.logical_or.reduce(lost.reshape(self.n, -1), 1)

    def lost_in(self, family: str, *index: int | slice) -> NDArray[np.bool_] | None:
        """Return a mask of the damaged entries [records, slots, ...]; None if there are none."""
        return self._salvage.lost(family, *index)

    def has_column(self, record: int, slot: int) -> bool:
        """Whether a slot existed when a record was written."""
        return bool(slot < self.records[record, RecordColumn.WIDTH])

    def series(self, family: str, slot: int, *inner: int | slice) -> NDArray[Any]:
        """Return one slot (or "kpi" column) over all records, [n, ...]; fill values if missing."""
        column = RecordColumn.KPIS if family == "kpi" else RecordColumn.WIDTH
        parts = [
            (name, records, self._salvage.read(name, records, slot, *inner))
            for name, records, width in self._spans(family, column)
            if slot < width
        ]
        if not parts:
            return self._empty(family, (slot, *inner))
        result = np.full((self.n, *parts[0][2].shape[1:]), _fill(parts[0][2]), parts[0][2].dtype)
        for _, records, data in parts:
            result[records] = data
        return result

    def expect(self, slot: int, columns: Sequence[int], *, most: int) -> list[object]:
        """Start to read columns of a slot's statistics for which `series` will be asked.

        Args:
            slot: the slot.
            columns: columns of "agg".
            most: bytes of chunks that may be read; those of a longer run would leave the cache
                before they are needed.

        Returns:
            The reads; while they are kept, `series` waits for them instead of beginning its own.
        """
        found: list[object] = []
        with suppress(DamagedRunError), self._db.reading("agg"):
            for name, records, width in self._spans("agg", RecordColumn.WIDTH):
                if slot >= width:
                    continue
                needed = columns[:1] if name.endswith("/row") else columns  # a row has them all
                chunk, count = self._tables.forms[name].chunk, records.stop - records.start
                most -= -(-count // chunk[0]) * len(needed) * math.prod(chunk) * 4  # float32
                if most < 0:
                    break
                handle = self._handle(name, cached=True)
                found += [handle[records, slot, column].read() for column in needed]
        return found

    def heat(self, family: str, *inner: int | slice) -> NDArray[Any]:
        """Return all slots over all records, [n, slots, ...]; fill values before they existed."""
        count = len(self.slots)
        result: NDArray[Any] | None = None
        for name, records, width in self._spans(family, RecordColumn.WIDTH):
            upto = min(width, count)
            data = self._salvage.read(name, records, slice(0, upto), *inner)
            if result is None:
                result = np.full((self.n, count, *data.shape[2:]), _fill(data), data.dtype)
            result[records, :upto] = data
        return self._empty(family, (slice(0, count), *inner)) if result is None else result

    def tile(self, column: int, records: slice, slots: slice) -> NDArray[np.float32]:
        """Return one column of statistics of some slots over some records, [records, slots].

        The chunks of blocks do not stay in the cache: whoever joins many runs reads each once. A
        row is a chunk with all columns, and stays. NaN before a slot existed.
        """
        shape = records.stop - records.start, slots.stop - slots.start
        result = np.full(shape, np.nan, np.float32)
        for name, span, width in self._spans("agg", RecordColumn.WIDTH):
            start, stop = max(span.start, records.start), min(span.stop, records.stop)
            upto = min(width, slots.stop)
            if start >= stop or slots.start >= upto:
                continue
            index = slice(start, stop), slice(slots.start, upto), column
            try:
                data = self._read(name, *index, cached=name.endswith("/row"))
            except TooLargeError:
                raise
            except DamagedRunError:
                data = np.asarray(self._salvage.read(name, *index))
            result[start - records.start : stop - records.start, : upto - slots.start] = data
        return result

    def extremes(
        self, column: int, slots: slice, chosen: NDArray[np.bool_], within: slice
    ) -> Extremes:
        """Return the lowest and the highest values of a statistic in spans of records.

        Args:
            column: column of the statistic in "agg".
            slots: the slots.
            chosen: which records count [n].
            within: records, which the spans cover.
        """
        if self._levels is None:
            self._levels = LevelReader(self._db, self.records)
        read = partial(self.tile, column)
        return self._levels.extremes(column, slots, chosen=chosen, within=within, read=read)

    def rows(self, family: str, first: int, last: int) -> NDArray[Any]:
        """Return all slots over records `first` to `last` - 1; fill values before they existed."""
        count = len(self.slots)
        result: NDArray[Any] | None = None
        for name, records, width in self._spans(family, RecordColumn.WIDTH):
            start, stop = max(records.start, first), min(records.stop, last)
            if start >= stop:
                continue
            upto = min(width, count)
            data = self._salvage.read(name, slice(start, stop), slice(0, upto))
            if result is None:
                result = np.full((last - first, count, *data.shape[2:]), _fill(data), data.dtype)
            result[start - first : stop - first, :upto] = data
        return self._empty(family, (slice(0, count),)) if result is None else result

    def _spans(self, family: str, column: int) -> Iterator[tuple[str, slice, int]]:
        """Yield (array name, records, width) for spans that can each be read in one piece.

        Complete blocks come from the block array, later records from the row array. A block is as
        wide as its last record, because the commit of that record wrote the block.
        """
        block = self._block
        edge = self.n // block * block
        widths = self.records[:, column]
        yield from _equal_spans(f"{family}/blk", 0, block, widths[block - 1 : edge : block])
        yield from _equal_spans(f"{family}/row", edge, 1, widths[edge:])

    def _empty(self, family: str, inner: Index) -> NDArray[Any]:
        form = self._tables.forms.get(f"{family}/row")
        shape = [0 if form is None else self.n]
        full = form.shape[1:] if form else tuple(0 for _ in inner)
        for at, extent in enumerate(full):
            index = inner[at] if at < len(inner) else slice(0, extent)
            if isinstance(index, slice):
                shape.append(len(range(*index.indices(extent))))
        dtype = np.dtype(form.dtype if form else "float32")
        return np.full(shape, np.nan if dtype.kind == "f" else 0, dtype)

    # -- values and JSON

    def padded_row(self, family: str, record: int) -> NDArray[Any]:
        """Return a record's stored row, [1, columns, ...], including padding."""
        kpis = family == "kpi"
        column = RecordColumn.KPIS if kpis else RecordColumn.WIDTH
        width = int(self.records[record, column])
        return self._read(f"{family}/row", slice(record, record + 1), slice(0, width))

    def value(
        self, record: int, slot: int, sample: int | None = None, part: Part = ...
    ) -> NDArray[Any] | None:
        """Return a slot's raw value [samples, *dims], one sample [*dims], or a part of either.

        None if there is no value or the sample does not exist.

        Raises:
            DamagedRunError: the value is damaged; `damage` lists it.
        """
        with self._noting(f"values of record {record}"):
            stored = self._fact("values", record) or {}
            name = next((name for name, slots in stored.items() if slot in slots), None)
            if name is None:
                return None
            lane, (count, *dims) = self._lane(name, slot), self._tables.forms[name].shape[2:]
            if sample is not None and sample >= count:
                return None
            box, rest = cut(part, dims if sample is not None else (count, *dims))
            chosen: Index = box if sample is None else (sample, *box)
            return self._read(name, record, lane, *chosen)[rest]

    def preview(self, record: int, slot: int) -> StoredPreview | None:
        """Return a record's preview of a slot; None if it has none.

        Raises:
            DamagedRunError: the preview is damaged; `damage` lists it.
        """
        with self._noting(f"values of record {record}"):
            found = find_preview(self._fact("previews", record) or {}, slot)
            if found is None:
                return None
            name, axes = found
            values = self._read(name, record, self._lane(name, slot))
            return StoredPreview(axes, values)

    def _lane(self, name: str, slot: int) -> int:
        lane = self._tables.lanes.get(name, {}).get(slot)
        if lane is None:
            raise DamagedRunError(f"{self._db.path}: the table of lanes lacks slot {slot}.")
        return lane

    def value_slots(self, record: int) -> list[int]:
        """Return the slots with raw values in a record."""
        stored = self._fact("values", record) or {}
        return sorted(slot for slots in stored.values() for slot in slots)

    def stored_values(self, record: int) -> dict[str, list[int]]:
        """Return the arrays with a record's raw values or previews, and the slots in each."""
        stored = {name: [*slots] for name, slots in (self._fact("values", record) or {}).items()}
        for name, groups in (self._fact("previews", record) or {}).items():
            for _, slots in groups:
                stored.setdefault(name, []).extend(slots)
        return stored

    def samples(self, record: int) -> list[int]:
        """Return the batch indices recorded individually; none if they are damaged."""
        what = self._facts_name(record)
        return list(self._unless_damaged(what, lambda: self._fact("samples", record)) or [])

    def extra(self, record: int) -> dict[str, Any]:
        """Return the free-form facts of a record; none if they are damaged."""
        what = self._facts_name(record)
        return dict(self._unless_damaged(what, lambda: self._fact("extra", record)) or {})

    def _facts_name(self, record: int) -> str:
        """Return the name in `damage` of a record's JSON facts, which other records share."""
        return f"facts of records from {int(self.records[record, RecordColumn.FACTS])} on"

    def check_json_facts(self, record: int) -> None:
        """Read the JSON facts of a record; raise DamagedRunError if they are damaged."""
        self._refuse_lost(record)
        self._facts(int(self.records[record, RecordColumn.FACTS]))

    def document(self, name: str) -> Any:
        """Return the newest document with the given name; None if it is missing or damaged."""
        return self._unless_damaged(f"the document {name!r}", lambda: self.read_document(name))

    def read_document(self, name: str) -> Any:
        """Return the newest document with the given name; None if there is none.

        Raises:
            DamagedRunError: the document is damaged.
        """
        if name not in self._documents:
            return None
        key = document_key(name)
        content = self._db.read_json(key, revision=self._documents[name])
        try:
            check_depth(content, name)
            return check_document(name, content)
        except WRONG as error:
            raise DamagedRunError(f"{self._db.path}: key {key!r} is invalid at {error}.") from error

    def structure(self, digest: str) -> Structure | None:
        """Return a stored dependency graph; None if it is damaged."""
        return self._unless_damaged(f"the graph {digest}", lambda: self.read_structure(digest))

    def read_structure(self, digest: str) -> Structure:
        """Return a stored dependency graph; raise DamagedRunError if it is damaged."""
        key = graph_key(digest)
        row = self._db.read_json(key)
        try:
            keys = [SlotKey(node, role, int(k), pass_) for node, role, k, pass_ in row["keys"]]
            edges = [(int(a), int(b), bool(gradient)) for a, b, gradient in row["edges"]]
            check_edges(edges, nodes=len(keys))
            return Structure(row["hash"], keys, list(row["kinds"]), edges, list(row["cuts"]))
        except WRONG as error:
            raise DamagedRunError(f"{self._db.path}: key {key!r} is invalid at {error}.") from error

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Add an error caused by damage to `damage`, and pass it on."""
        try:
            yield
        except TooLargeError:
            raise
        except DamagedRunError as error:
            loss = f"{what}: {error}"
            if loss not in self._tables.damage:
                self._tables.damage.append(loss)
            raise

    def _unless_damaged(self, what: str, read: Callable[[], T]) -> T | None:
        """Return what `read` returns; if that is damaged, add it to `damage` and return None."""
        known = len(self._tables.damage)
        try:
            with self._noting(what):
                return read()
        except TooLargeError:
            raise
        except DamagedRunError as error:
            if len(self._tables.damage) > known:
                _log.warning("comgra: damaged and left out: %s: %s", what, error)
            return None

    def _fact(self, name: str, record: int) -> Any:
        """Return a run-length encoded fact, which is valid until the facts change."""
        self._refuse_lost(record)
        first = int(self.records[record, RecordColumn.FACTS])
        found = None
        for offset, value in self._facts(first).get(name, ()):
            if first + offset > record:
                break
            found = value
        return found

    def _refuse_lost(self, record: int) -> None:
        if self.records[record, RecordColumn.STEP] == LOST:
            raise DamagedRunError(f"{self._db.path}: the facts of record {record} are lost.")

    def _read_facts(self, first: int) -> Mapping[str, Any]:
        key = step_key(first)
        try:
            return check_facts(self._db.read_json(key))
        except WRONG as error:
            raise DamagedRunError(f"{self._db.path}: key {key!r} is invalid at {error}.") from error

    # -- arrays

    @property
    def _block(self) -> int:
        form = self._tables.forms.get("kpi/blk")
        return form.chunk[0] if form else 1

    def _new_salvage(self) -> Salvage:
        tables = self._tables
        return Salvage(_of_weak(self._read), tables.forms, tables.records, tables.damage)

    def _read(self, name: str, *index: int | slice, cached: bool = True) -> NDArray[Any]:
        bound = self._bound
        try:
            return self._read_once(name, *index, cached=cached)
        except TooLargeError:
            raise
        except DamagedRunError:
            if self._bound == bound and not self._renewed():  # nor has another thread
                raise
            return self._read_once(name, *index, cached=cached)

    def _renewed(self) -> bool:
        """Use the newest index if there is another; the files of the old one may be gone."""
        state = self._db.manifest_state()
        if state is None or state == self._manifest:
            return False
        self._manifest, self._bound = state, time.time()
        self._handles = {}
        return True

    def _read_once(self, name: str, *index: int | slice, cached: bool) -> NDArray[Any]:
        with self._db.reading(name):
            handle = self._handle(name, cached=cached)
            part = handle[index]
            reserve(math.prod(part.shape) * part.dtype.numpy_dtype.itemsize, self._db.path, name)
            if self.sums is not None:
                return self.sums.read(handle, self._tables.forms[name], index)
            data: NDArray[Any] = part.read().result()
        return data

    def _handle(self, name: str, *, cached: bool) -> ts.TensorStore:
        handle = self._handles.get((name, cached))
        if handle is None:
            form = self._tables.forms.get(name)
            if form is None:
                raise DamagedRunError(f"{self._db.path}: the array table lacks {name!r}.")
            handle = self._db.array(form, recheck=self._bound, cached=cached)
            self._handles[name, cached] = handle
        return handle


def _equal_spans(
    name: str, start: int, step: int, widths: NDArray[np.float64]
) -> Iterator[tuple[str, slice, int]]:
    """Yield runs of equal widths; each width covers `step` records."""
    edges = np.flatnonzero(np.diff(widths)) + 1
    for first, last in zip([0, *edges], [*edges, len(widths)], strict=True):
        if first < last:
            yield name, slice(start + first * step, start + last * step), int(widths[first])


def _fill(data: NDArray[Any]) -> float:
    return float("nan") if data.dtype.kind == "f" else 0


def _of_weak(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a method without keeping its object alive.

    A view that holds its own methods is a cycle, which waits for the garbage collector: whoever
    reads a thousand runs one by one would have many of them in memory.
    """
    weak = WeakMethod(method)

    def call(*arguments: Any) -> T:
        found = weak()
        assert found is not None  # only the view itself calls it
        result: T = found(*arguments)
        return result

    return call
