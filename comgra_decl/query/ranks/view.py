"""A joint view of the records that all ranks of a run have.

Slots and steps are matched by name and number, never by their position in a database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import Note, SlotInfo, SlotKey, StoredPreview, Structure
from comgra_decl.store import RunMeta
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn, round_up
from comgra_decl.store.levels import SPAN, Extremes, level_columns, reduced
from comgra_decl.store.parts import Part, cut
from comgra_decl.store.sessions import Session
from comgra_decl.store.view import View

from . import differences, facts, joining
from .batches import NO_COORDINATES, same_batch
from .member import Member
from .readings import Columns, Lost, Reading, stacked
from .side_by_side import side_by_side

_SLOTS = 64
"""Slots that are joined together in a heat map: as many as a chunk of a block has."""

_READ, _JOINED = 1 << 20, 1 << 17
"""Numbers of one column that all ranks together contribute to a tile of a heat map: those that are
read together, as float32, and those that are joined together, as float64. Some columns are held at
a time, so that a tile takes up to 30 MB, whatever the number of ranks."""

_BEGUN = 32 << 20
"""Bytes of chunks of all ranks whose reads may begin before they are needed."""

_PRESENT = "nonfinite.mean"
"""A column that is a number wherever a tensor was recorded."""

T = TypeVar("T")

_log = logging.getLogger("comgra_decl")


class JoinedView:
    """A `RecordView` of all ranks together, as of the last poll."""

    def __init__(
        self,
        views: Mapping[int, View],
        *,
        meta: RunMeta,
        order: dict[SlotKey, int],
        complete: bool,
        far: bool = False,
        coordinates: Mapping[int, Mapping[str, int]] = NO_COORDINATES,
    ) -> None:
        """Match slots and records.

        Args:
            views: view of each rank, in ascending order.
            meta: metadata of all ranks together.
            order: number of each slot; new slots are appended to it.
            complete: whether all ranks exist; until then there are no records.
            far: whether the run is in a bucket.
            coordinates: each rank's coordinates in a device mesh, if it has one.
        """
        self.meta = meta
        self.ranks = list(views)
        self.complete = complete
        self._far = far
        self._leader = next(iter(views.values()))
        by_key = [{slot.key: slot for slot in view.slots} for view in views.values()]
        for known in by_key:
            for key in known:
                order.setdefault(key, len(order))
        listed = [[known.get(key) for key in order] for known in by_key]
        records = facts.common_records(list(views.values()) if complete else [])
        if not complete:
            records = [np.empty(0, np.int64) for _ in views]
        self._members = [
            Member(view, np.array([-1 if s is None else s.id for s in slots], np.int64), mine)
            for view, slots, mine in zip(views.values(), listed, records, strict=True)
        ]
        self._slots = facts.joint_slots(listed)
        self._coordinates = coordinates
        self._batches = same_batch(self.ranks, coordinates)
        self._joined = joining.Ranks(listed, self._batches) if self._slots else None
        self._sources = (
            self._members if self._joined is None else _first(self._members, self._joined)
        )
        self.n = len(records[0])
        self._count = meta.sample_count // len(self._batches)
        self._shape_codes: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()
        self._copy: View | None = None

    # -- facts

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots of all ranks, by number."""
        return self._slots

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes that differ from the slot table, each from the first rank that has the tensor."""
        return list(self._shape_codes)

    def shape(self, slot: int, code: float) -> tuple[int, ...] | None:
        """Return the shape of a slot in a record, given its value in the "shape" column."""
        shapes = self.shapes
        if code == 0:
            return self.slots[slot].shape
        return shapes[int(code) - 1] if 1 <= code <= len(shapes) else None

    def coordinates(self, slot: int) -> dict[str, list[int]]:
        """Return the coordinates, by dimension, of the ranks that have a slot; empty if unknown."""
        pairs = zip(self.ranks, self._members, strict=True)
        known = [self._coordinates.get(rank, {}) for rank, m in pairs if m.ids[slot] >= 0]
        names = dict.fromkeys(name for own in known for name in own)
        return {name: sorted({own[name] for own in known if name in own}) for name in names}

    @property
    def reshaped(self) -> bool:
        """Whether any record of any rank has a tensor shape that differs from the slot table."""
        return any(member.view.reshaped for member in self._members)

    @property
    def records(self) -> NDArray[np.float64]:
        """Numeric facts about the common records, from the first rank; batch sizes are summed."""
        return self._records

    @cached_property
    def _records(self) -> NDArray[np.float64]:
        tables = [member.view.records[member.records] for member in self._members]
        joined = tables[0].copy()
        sizes = np.stack(
            [tables[members[0]][:, RecordColumn.BATCH_SIZE] for members in self._batches]
        )
        joined[:, RecordColumn.BATCH_SIZE] = np.where((sizes < 0).any(0), -1, sizes.sum(0))
        costs = np.stack([table[:, RecordColumn.COST] for table in tables])
        joined[:, RecordColumn.COST] = costs.max(0)  # the other ranks wait for the slowest
        return joined

    @cached_property
    def superseded(self) -> NDArray[np.bool_]:
        """All False, because superseded records of the individual ranks were left out."""
        return np.zeros(self.n, bool)

    @cached_property
    def superseded_scalars(self) -> NDArray[np.bool_]:
        """All False, as for records."""
        return np.zeros(len(self.scalars), bool)

    @property
    def sessions(self) -> list[Session]:
        """Sessions of the first rank."""
        return self._leader.sessions

    @property
    def train_steps(self) -> NDArray[np.int64]:
        """The steps of the common records in train mode."""
        modes = self.names("mode")
        train = modes.index("train") if "train" in modes else -1
        chosen = self.records[:, RecordColumn.MODE] == train
        return np.asarray(self.records[chosen, RecordColumn.STEP], np.int64)

    def names(self, table: str) -> list[str]:
        """Return the names in a table, by code."""
        if table in ("scalar", "scalar_type"):
            return self._joint_scalars[1][table]
        return self._leader.names(table)

    @property
    def scalars(self) -> NDArray[np.void]:
        """Scalars averaged over the ranks that log them, for steps at which all of them did."""
        return self._joint_scalars[0]

    @cached_property
    def _joint_scalars(self) -> tuple[NDArray[np.void], dict[str, list[str]]]:
        self._of_each(lambda member: member.view.scalars)  # reads them, and keeps them
        return facts.join_scalars([member.view for member in self._members])

    @property
    def notes(self) -> list[Note]:
        """The notes of all ranks, each once."""
        return facts.join_notes([member.view.notes for member in self._members], self.ranks)

    @property
    def damage(self) -> list[str]:
        """One sentence for each damaged part of any rank."""
        views = [member.view for member in self._members]
        pairs = zip(self.ranks, views, strict=True)
        return [f"rank {rank}: {loss}" for rank, view in pairs for loss in view.damage]

    def look_for_damage(self) -> None:
        """Read all documents of all ranks."""
        self._of_each(lambda member: member.view.look_for_damage())

    def document(self, name: str) -> Any:
        """Return the first rank's document; report and findings include those of other ranks.

        The post-mortem comes from the rank that failed first.
        """
        documents = self._of_each(lambda member: member.view.document(name))
        if name == "post_mortem":
            failed = [document for document in documents if document is not None]
            return min(failed, key=lambda document: document["time"], default=None)
        if name == "findings":
            return facts.join_findings(documents, self.ranks)
        if name != "report" or documents[0] is None:
            return documents[0]
        return facts.join_reports(documents, self.ranks, self.differences)

    def structure(self, digest: str) -> Structure | None:
        """Return a dependency graph from the first rank by its hash; None if it is damaged."""
        return self._leader.structure(digest)

    def samples(self, record: int) -> list[int]:
        """Return indices in the global batch, which is the concatenation of the ranks' batches.

        If a rank has fewer samples than are recorded, the missing ones are -1.
        """
        found = self._of_batches(lambda member: member.samples(record))
        return facts.join_places(found, self._count)

    def extra(self, record: int) -> dict[str, Any]:
        """Return the extra facts of a record, with the labels of all samples."""
        parts = self._of_batches(lambda m: m.view.extra(int(m.records[record])))
        return facts.join_extra(parts, self._count)

    # -- statistics

    def has_column(self, record: int, slot: int) -> bool:
        """Whether the slot existed on any rank when the record was written."""
        return any(member.has(record, slot) for member in self._members)

    def row(self, family: str, record: int, *inner: int | slice) -> NDArray[Any]:
        """Return the array that a record stores for a family, or the part selected by `inner`.

        The whole array is [slots, ...].

        Raises:
            DamagedRunError: a requested histogram is damaged on a rank.
        """
        whole, one = slice(0, len(self.slots)), slice(record, record + 1)
        joined, lost = self._joined_of(
            family, lambda name, m: m.row(name, record)[None], whole, one
        )
        if lost is not None and np.any(lost[0][inner[:1]] if inner else lost):
            raise DamagedRunError(f"histograms of record {record} are damaged, see `run.damage`")
        found: NDArray[Any] = joined[0]
        return found[inner] if inner else found

    def rows(self, family: str, first: int, last: int) -> NDArray[Any]:
        """Return all slots over the common records `first` to `last` - 1."""
        whole, records = slice(0, len(self.slots)), slice(first, last)
        return self._joined_of(family, lambda name, m: m.rows(name, first, last), whole, records)[0]

    def series(self, family: str, slot: int, *inner: int | slice) -> NDArray[Any]:
        """Return one slot over all common records, [n, ...]; a "kpi" column is the ranks' mean."""
        if family == "kpi":
            name = self.names("kpi")[slot - SYSTEM_COLUMNS]
            return facts.join_kpi(self._of_each(lambda member: facts.kpi_of(member, name)))
        if family == "agg":
            index = inner[0] if inner else slice(None)
            if not isinstance(index, slice):
                column = int(index)
                copied = self._copied(column, lambda copy: copy.series("agg", slot, column))
                if copied is not None:
                    return copied
            return self._joined_series(slot, index)
        table, _ = self._series_table(family, slot)
        return table[(slice(None), 0, *inner)]

    def heat(self, family: str, *inner: int | slice) -> NDArray[Any]:
        """Return one column for all slots over all common records, [n, slots]."""
        if family != "agg" or len(inner) != 1 or not isinstance(inner[0], (int, np.integer)):
            table = self.rows(family, 0, self.n)
            return table[(slice(None), slice(None), *inner)]
        return self.tile(int(inner[0]), slice(0, self.n), slice(0, len(self.slots)))

    def tile(self, column: int, records: slice, slots: slice) -> NDArray[np.float32]:
        """Return one column for some slots in some common records, [records, slots]."""
        copied = self._copied(column, lambda copy: copy.tile(column, records, slots))
        return self.joined_tile(column, records, slots) if copied is None else copied

    def joined_tile(self, column: int, records: slice, slots: slice) -> NDArray[np.float32]:
        """Return what `tile` returns, joined from the ranks themselves."""
        name = self.meta.columns[column]
        joined = np.empty((records.stop - records.start, slots.stop - slots.start), np.float32)
        for few in _spans(slots.start, slots.stop, _SLOTS):
            one = [[member.slot(s.id) for s in self.slots[few]] for member in self._members]
            ranks = joining.Ranks(one, self._batches)
            wide = len(self._members) * (few.stop - few.start)
            at = slice(few.start - slots.start, few.stop - slots.start)
            for many in _spans(records.start, records.stop, max(1, _READ // wide)):
                for members in (self._sources, self._members):
                    read = Columns(partial(self._tile, members, records=many, slots=few))
                    for part in _spans(many.start, many.stop, max(1, _JOINED // wide)):
                        own = slice(part.start - many.start, part.stop - many.start)
                        columns = Columns(partial(_rows, read, own))
                        to = slice(part.start - records.start, part.stop - records.start)
                        joined[to, at] = self._column(name, columns, ranks, self.slots[few])
                    present = read.reading(_PRESENT)
                    if not self._lacks_copies(present, read.losses, few, many):
                        break
        return joined

    def extremes(
        self, column: int, slots: slice, chosen: NDArray[np.bool_], within: slice
    ) -> Extremes:
        """Return the lowest and the highest values of a column in spans of common records.

        Without joined statistics, all records are read: the extremes of the ranks are not those of
        the joined values.
        """
        copied = self._copied(column, lambda copy: copy.extremes(column, slots, chosen, within))
        if copied is not None:
            return copied
        first, last = within.start // SPAN * SPAN, min(round_up(within.stop, SPAN), self.n)
        part = slice(first, last)
        return reduced(self.tile(column, part, slots), chosen[part], first)

    def _tile(
        self, members: Sequence[Member], name: str, *, records: slice, slots: slice
    ) -> Reading:
        """Read a column of some records and slots from ranks, [ranks, records, slots]."""
        at = self._at(name)
        return self._stacked(members, slots, lambda m: m.tile(at, records, slots))

    def lost(self, family: str, slot: int) -> Lost:
        """Return a mask of the common records in which a slot is damaged on any rank, or None."""
        names = dict.fromkeys((family, "agg"))
        found = [
            lost
            for m in self._members
            for name in names
            if (lost := m.lost(name, slot)) is not None
        ]
        if not found or family != "hist":
            return np.logical_or.reduce(found) if found else None
        _, lost = self._series_table(family, slot)
        return None if lost is None else lost[:, 0]

    # -- joining

    def use_copy(self, copy: View | None) -> None:
        """Read statistics from joined statistics, if they have the same records and slots."""
        if copy is not None and copy.n == self.n:
            same = [slot.key for slot in copy.slots] == [slot.key for slot in self.slots]
            self._copy = copy if same else None

    def _copied(self, column: int, read: Callable[[View], T]) -> T | None:
        """Return what is read from joined statistics; None without them, or if they are damaged."""
        copy = self._copy
        if copy is None or column >= level_columns(self.meta):
            return None
        try:
            found = read(copy)
        except DamagedRunError:
            found = None
        if found is None or copy.damage:
            _log.warning("comgra: joined statistics are damaged, so the ranks are joined again")
            self._copy = None
            return None
        return found

    def _of_each(self, read: Callable[[Member], T]) -> list[T]:
        """Return what is read from each rank."""
        return side_by_side(read, self._members, far=self._far)

    def _stacked(
        self, members: Sequence[Member], slots: slice, read: Callable[[Member], Reading]
    ) -> Reading:
        """Return what is read from the ranks that have some slots; fill values for the others."""
        held = [member.holds(slots) for member in members]
        if not any(held):  # there are no slots
            held = [True] * len(members)
        found = iter(side_by_side(read, compress(members, held), far=self._far))
        return stacked([next(found) if own else None for own in held])

    def _lacks_copies(
        self, present: Reading, losses: Iterable[Lost], slots: slice, records: slice
    ) -> bool:
        """Whether another rank may have a copy that the first one lacks; then all are read.

        A copy is damaged, or the first rank has not recorded it while training, such as the weight
        of a layer that this rank alone has skipped.

        Args:
            present: numbers of the first rank with each copy, [ranks, records, slots]; NaN where it
                has not recorded it.
            losses: masks of what is damaged, [ranks, records, slots, ...].
            slots: the slots that were read.
            records: the records that were read.
        """
        if self._joined is None or len(self._members) < 2:
            return False
        copies = np.flatnonzero(self._joined.joints[slots] == joining.Joint.COPIES)
        if not len(copies):
            return False
        if any(lost is not None and lost[:, :, copies].any() for lost in losses):
            return True
        modes = self.names("mode")
        train = modes.index("train") if "train" in modes else -1
        trained = self.records[records, RecordColumn.MODE] == train
        buffers = np.array([slot.kind == "buffer" for slot in self.slots[slots]])[copies]
        absent = np.isnan(present.data[:, :, copies]).all(0) & (trained[:, None] | buffers)
        if not absent.any():
            return False
        return any((absent & m.existed(records, slots)[:, copies]).any() for m in self._members)

    def _of_batches(self, read: Callable[[Member], T]) -> list[T]:
        """Return what is read from the first rank of each batch."""
        first = [self._members[members[0]] for members in self._batches]
        return side_by_side(read, first, far=self._far)

    def _at(self, name: str) -> int:
        """Return the index of a column; raise KeyError if the run lacks it."""
        columns = self.meta.columns
        if name not in columns:
            raise KeyError(name)
        return columns.index(name)

    def _joined_of(
        self, family: str, read: Callable[[str, Member], Reading], chosen: slice, records: slice
    ) -> tuple[NDArray[Any], Lost]:
        """Join an array [records, slots, ...] of a family, given a function that reads it.

        Args:
            family: family of the array.
            read: reads the array of a family: the given one, or the statistics that belong to it.
            chosen: the slots that are read.
            records: the records that are read.

        Returns:
            The array; for histograms, also a mask [records, slots] of those missing because of
            damage.
        """
        names = dict.fromkeys(("agg", family))
        tables = {}
        for members in (self._sources, self._members):
            tables = {n: self._stacked(members, chosen, partial(read, n)) for n in names}
            losses = [table.lost for table in tables.values()]
            present = tables["agg"][..., self._at(_PRESENT)]
            if not self._lacks_copies(present, losses, chosen, records):
                break
        statistics, own = tables["agg"], tables[family]
        if family == "agg":
            return self._joined_table(statistics), None
        slots = self.slots[chosen]
        listed = [[m.slot(s.id) for s in slots] for m in self._members]
        ranks = joining.Ranks(listed, self._batches)
        if family == "hist":
            return facts.join_counts(own, statistics, ranks, self.meta.spacing)
        whole = None
        if (ranks.joints == joining.Joint.PIECES).any():
            whole = self._whole(ranks, statistics)
        return facts.join_samples(own, ranks, self.meta.statistics, whole), None

    def _series_table(self, family: str, slot: int) -> tuple[NDArray[Any], Lost]:
        """Return samples or histograms of one slot, [n, 1, ...], as `_joined_of` does."""
        one, all_ = slice(slot, slot + 1), slice(0, self.n)
        return self._joined_of(family, lambda name, m: m.series(name, slot)[:, None], one, all_)

    def _columns(self, table: Reading) -> Columns:
        """Return the columns of a table [ranks, ..., slots, columns]."""
        return Columns(lambda name: table[..., self._at(name)])

    def _joined_table(self, table: Reading) -> NDArray[np.float32]:
        """Join a table [ranks, ..., slots, columns] of statistics."""
        if self._joined is None:
            return np.asarray(table.data[0], np.float32)
        read, names = self._columns(table), self.meta.columns
        return np.stack([self._column(n, read, self._joined, self.slots) for n in names], -1)

    def _joined_series(self, slot: int, index: int | slice) -> NDArray[np.float32]:
        """Join one or more columns of a slot's statistics: [n], or [n, columns]."""
        one, all_ = slice(slot, slot + 1), slice(0, self.n)

        def read(members: Sequence[Member], name: str) -> Reading:
            at = self._at(name)
            return self._stacked(members, one, lambda m: m.series("agg", slot, at))[..., None]

        ranks = joining.Ranks([[m.slot(slot)] for m in self._members], self._batches)
        several = isinstance(index, slice)
        names = self.meta.columns[index] if isinstance(index, slice) else [self.meta.columns[index]]
        joined = np.empty((self.n, len(names)), np.float32)
        for members in (self._sources, self._members):
            columns = Columns(partial(read, members))
            begun = self._begun(members, slot, names) if self._far else []
            for at, name in enumerate(names):
                joined[:, at] = self._column(name, columns, ranks, self.slots[one])[:, 0]
            del begun  # by now, all of it has been read
            if not self._lacks_copies(columns.reading(_PRESENT), columns.losses, one, all_):
                break
        return joined if several else joined[:, 0]

    def _begun(self, members: Sequence[Member], slot: int, names: Sequence[str]) -> list[object]:
        """Start to read what joining some columns of a slot takes, from all ranks at once.

        Otherwise, each of these columns would be a request that waits for the one before.
        """
        needed = [_PRESENT, "rows", *names, *(f"{name.partition('.')[0]}.mean" for name in names)]
        known = [name for name in dict.fromkeys(needed) if name in self.meta.columns]
        columns = [self.meta.columns.index(name) for name in known]
        held = [member for member in members if member.ids[slot] >= 0]
        most = _BEGUN // max(1, len(held))
        return [
            read
            for member in held
            for read in member.view.expect(int(member.ids[slot]), columns, most=most)
        ]

    def _column(
        self, name: str, columns: Columns, ranks: joining.Ranks, slots: Sequence[SlotInfo]
    ) -> NDArray[np.float32]:
        """Return a column joined over all ranks, [..., slots]."""
        if name != "shape":
            return ranks.column(name, columns.data, columns.lost)
        codes = columns.data(name)
        there = (~np.isnan(codes)).argmax(0)  # the first rank that has the tensor
        joined: NDArray[np.float64] = np.take_along_axis(codes, there[None], 0)[0]
        other = ((there > 0) | (joined > 0)).reshape(-1, len(slots)).any(0)
        for at in np.flatnonzero(other).tolist():
            number, found = slots[at].id, joined[..., at].copy()
            for rank, member in enumerate(self._members):
                mine = there[..., at] == rank
                for code in np.unique(found[mine & ~np.isnan(found)]).tolist():
                    shape = member.view.shape(int(member.ids[number]), code)
                    joined[mine & (found == code), at] = self._shape_code(slots[at], shape)
        return joined.astype(np.float32)

    def _shape_code(self, slot: SlotInfo, shape: tuple[int, ...] | None) -> float:
        if shape is None:
            return np.nan
        with self._lock:
            return (
                0
                if shape == slot.shape
                else self._shape_codes.setdefault(shape, len(self._shape_codes) + 1)
            )

    def _whole(self, ranks: joining.Ranks, table: Reading) -> NDArray[np.float32]:
        """Return the statistics [..., slots, statistics] of tensors split across the ranks."""
        read = self._columns(table)
        names = [f"{statistic}.mean" for statistic in self.meta.statistics]
        return np.stack([ranks.column(name, read.data, read.lost) for name in names], -1)

    # -- values

    def value(
        self, record: int, slot: int, sample: int | None = None, part: Part = ...
    ) -> NDArray[Any] | None:
        """Return part of a slot's values: of the samples of all ranks, or of the assembled tensor.

        If the part belongs to a single sample, or if all ranks have the same tensor, only that part
        is read.
        """
        joint = joining.how_joined(self.slots[slot])
        if joint is joining.Joint.SAMPLES and sample is not None:
            number, own = divmod(sample, max(1, self._count))
            members = [self._members[at] for at in self._batches[number]]
            return next(m for m in members if m.ids[slot] >= 0 or m is members[-1]).value(
                record, slot, own, part
            )
        if joint is joining.Joint.COPIES:
            return self._copied_value(record, slot, sample, part)
        whole = self._whole_value(record, slot, joint)
        if whole is None or (sample is not None and sample >= len(whole)):
            return None
        whole = whole if sample is None else whole[sample]
        box, rest = cut(part, whole.shape)
        return whole[box][rest]

    def _copied_value(
        self, record: int, slot: int, sample: int | None, part: Part
    ) -> NDArray[Any] | None:
        """Return the value of the first rank on which it can be read."""
        damage: DamagedRunError | None = None
        for member in self._members:
            try:
                value = member.value(record, slot, sample, part)
            except DamagedRunError as error:
                damage = error
                continue
            if value is not None:
                return value
        if damage is not None:
            raise damage
        return None

    def _whole_value(self, record: int, slot: int, joint: joining.Joint) -> NDArray[Any] | None:
        with suppress(DamagedRunError):
            found = self._assembled(self._sources, record, slot, joint)
            if found is not None:
                return found
        return self._assembled(self._members, record, slot, joint)

    def _assembled(
        self, holders: Sequence[Member], record: int, slot: int, joint: joining.Joint
    ) -> NDArray[Any] | None:
        parts = side_by_side(lambda m: m.value(record, slot), holders, far=self._far)
        there = [part for part in parts if part is not None]
        if not there:
            return None
        shape = self.slots[slot].shape
        pieces = [member.slot(slot) for member in self._members]
        if joint is joining.Joint.PIECES:
            return facts.assemble(shape, pieces, parts)
        batches = []
        for members in self._batches:
            own = [parts[at] for at in members if parts[at] is not None]
            if joint is joining.Joint.PARTS and own:
                mine = [pieces[at] for at in members], [parts[at] for at in members]
                own = [facts.assemble(shape, *mine)]
            batches += own[:1]
        found = [each for each in batches if each is not None]
        return np.concatenate(found) if len(found) == len(batches) else None

    def preview(self, record: int, slot: int) -> StoredPreview | None:
        """Return the preview from the first rank that has one; it shows that rank's samples."""
        for member in self._members:
            found = member.preview(record, slot)
            if found is not None:
                return found
        return None

    def value_slots(self, record: int) -> list[int]:
        """Return the slots for which any rank has raw values."""
        found: set[int] = set()
        held_by = self._of_each(lambda member: member.view.value_slots(int(member.records[record])))
        for member, held in zip(self._members, held_by, strict=True):
            found.update(np.flatnonzero(np.isin(member.ids, held)).tolist())
        return sorted(found)

    # -- differing copies

    @cached_property
    def differences(self) -> list[differences.Difference]:
        """Tensors that should be identical on all ranks but differ in a checked record."""
        if self.n == 0 or self._joined is None:
            return []
        origins, joints = self._joined.origins, self._joined.joints
        alike = np.isin(joints, (joining.Joint.COPIES, joining.Joint.PIECES))
        sets = [  # slots, and the ranks that hold the same
            (at, mine)
            for at in np.flatnonzero(alike).tolist()
            for first in np.unique(origins[:, at]).tolist()
            if first >= 0 and (mine := origins[:, at] == first).sum() > 1
        ]
        if not sets:
            return []
        ids, held = [at for at, _ in sets], np.stack([mine for _, mine in sets], -1)

        def rows(record: int) -> NDArray[Any]:
            read = stacked(self._of_each(lambda m: m.row("agg", record)[ids]))
            if read.lost is not None:  # damage is not a difference
                read.data[read.lost.any(-1)] = np.nan
            read.data[~held] = np.nan
            return read.data

        steps = self.records[:, RecordColumn.STEP].astype(np.int64)
        copies = [self.slots[at] for at in ids]
        return differences.differing(copies, steps, rows, self.meta.columns)


def _first(members: Sequence[Member], ranks: joining.Ranks) -> list[Member]:
    """Return the ranks, each only with the slots of which it is the first to hold a copy."""
    own = np.arange(len(members))[:, None] == ranks.origins
    return [replace(m, ids=np.where(mine, m.ids, -1)) for m, mine in zip(members, own, strict=True)]


def _spans(first: int, last: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` records."""
    for start in range(first, last, most):
        yield slice(start, min(start + most, last))


def _rows(columns: Columns, records: slice, name: str) -> Reading:
    """Return some records of a column [ranks, records, slots]."""
    return columns.reading(name)[:, records]
