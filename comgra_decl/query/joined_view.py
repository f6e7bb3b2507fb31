"""The records that all ranks of a run have, as one view.

Slots and steps are matched by name and number, never by their place in a database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import Note, SlotInfo, SlotKey, Structure
from comgra_decl.store import RunMeta
from comgra_decl.store.layout import SYSTEM_COLUMNS, RecordColumn
from comgra_decl.store.parts import Part, cut
from comgra_decl.store.sessions import Session
from comgra_decl.store.view import View

from . import joining, rank_facts


@dataclass
class _Member:
    """One rank: its view, and its slots (-1: none) and records for each of the joint ones."""

    view: View
    ids: NDArray[np.int64]
    records: NDArray[np.int64]


class JoinedView(View):
    """What all ranks together hold, below what each of them had at the last poll."""

    def __init__(
        self,
        views: Mapping[int, View],
        *,
        meta: RunMeta,
        order: dict[SlotKey, int],
        complete: bool,
    ) -> None:
        """Matches slots and records.

        Args:
            views: of each rank, ascending.
            meta: of all ranks together.
            order: the number of each slot; grows.
            complete: whether all ranks are there; otherwise there are no records yet.
        """
        self.meta = meta
        self.ranks = list(views)
        self.complete = complete
        self._leader = next(iter(views.values()))
        by_key = [{slot.key: slot for slot in view.slots} for view in views.values()]
        for known in by_key:
            for key in known:
                order.setdefault(key, len(order))
        listed = [[known.get(key) for key in order] for known in by_key]
        records = rank_facts.common_records(list(views.values()) if complete else [])
        if not complete:
            records = [np.empty(0, np.int64) for _ in views]
        self._members = [
            _Member(view, np.array([-1 if s is None else s.id for s in slots], np.int64), mine)
            for view, slots, mine in zip(views.values(), listed, records, strict=True)
        ]
        self._slots = rank_facts.joint_slots(listed)
        self._joined = joining.Ranks(listed) if self._slots else None
        self.n = len(records[0])
        self._count = meta.sample_count // len(views)

    # -- facts

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots of all ranks, by number."""
        return self._slots

    @property
    def records(self) -> NDArray[np.float64]:
        """Numeric facts of the common records: the first rank's, with the samples of all."""
        return self._records

    @cached_property
    def _records(self) -> NDArray[np.float64]:
        tables = [member.view.records[member.records] for member in self._members]
        joined = tables[0].copy()
        sizes = np.stack([table[:, RecordColumn.BATCH_SIZE] for table in tables])
        joined[:, RecordColumn.BATCH_SIZE] = np.where((sizes < 0).any(0), -1, sizes.sum(0))
        costs = np.stack([table[:, RecordColumn.COST] for table in tables])
        joined[:, RecordColumn.COST] = costs.max(0)  # the others wait for the slowest
        return joined

    @cached_property
    def superseded(self) -> NDArray[np.bool_]:
        """No record here gave way to another: those of the single ranks were left out."""
        return np.zeros(self.n, bool)

    @cached_property
    def superseded_scalars(self) -> NDArray[np.bool_]:
        """Nor did a number."""
        return np.zeros(len(self.scalars), bool)

    @property
    def sessions(self) -> list[Session]:
        """Those of the first rank."""
        return self._leader.sessions

    @property
    def train_steps(self) -> NDArray[np.int64]:
        """The steps of the common records in train mode."""
        modes = self.names("mode")
        train = modes.index("train") if "train" in modes else -1
        chosen = self.records[:, RecordColumn.MODE] == train
        return np.asarray(self.records[chosen, RecordColumn.STEP], np.int64)

    def names(self, table: str) -> list[str]:
        """Returns the names of a table by code."""
        if table in ("scalar", "scalar_type"):
            return self._joint_scalars[1][table]
        return self._leader.names(table)

    @property
    def scalars(self) -> NDArray[np.void]:
        """The mean, over the ranks that ever said such a number, where all of them did."""
        return self._joint_scalars[0]

    @cached_property
    def _joint_scalars(self) -> tuple[NDArray[np.void], dict[str, list[str]]]:
        return rank_facts.join_scalars([member.view for member in self._members])

    @property
    def notes(self) -> list[Note]:
        """The notes of all ranks, each once."""
        return rank_facts.join_notes([member.view.notes for member in self._members], self.ranks)

    @property
    def losses(self) -> list[str]:
        """What is left out on any rank because it is damaged."""
        views = [member.view for member in self._members]
        pairs = zip(self.ranks, views, strict=True)
        return [f"rank {rank}: {loss}" for rank, view in pairs for loss in view.losses]

    def document(self, name: str) -> Any:
        """Returns the first rank's document; report and findings have what others add."""
        documents = [member.view.document(name) for member in self._members]
        if name == "findings":
            return rank_facts.join_findings(documents, self.ranks)
        if name != "report" or documents[0] is None:
            return documents[0]
        return rank_facts.join_reports(documents, self.ranks, self.differences)

    def structure(self, digest: str) -> Structure:
        """Returns a dependency graph: the first rank's."""
        return self._leader.structure(digest)

    def samples(self, record: int) -> list[int]:
        """Returns places in the global batch, in which the ranks' batches follow each other.

        Where a rank has fewer samples than are recorded, -1 stands for the missing ones.
        """
        views, at = zip(*((m.view, int(m.records[record])) for m in self._members), strict=True)
        return rank_facts.join_places(views, at, self._count)

    def extra(self, record: int) -> dict[str, Any]:
        """Returns the free-form facts of a record, with the labels of all samples."""
        parts = [member.view.extra(int(member.records[record])) for member in self._members]
        return rank_facts.join_extra(parts, self._count)

    # -- statistics

    def has_column(self, record: int, slot: int) -> bool:
        """Whether the slot existed, on any rank, when the record was written."""
        return any(self._has(member, record, slot) for member in self._members)

    def _has(self, member: _Member, record: int, slot: int) -> bool:
        own = int(member.ids[slot])
        return own >= 0 and member.view.has_column(int(member.records[record]), own)

    def row(self, family: str, record: int, *inner: int | slice) -> NDArray[Any]:
        """Returns a record's array of a family, [slots, ...], or what `inner` selects of it."""
        tables = [self._own_row(member, family, record) for member in self._members]
        if family == "agg":
            joined = self._joined_table(np.stack(tables).astype(np.float64))
        else:
            edges = np.stack([self._own_row(m, "agg", record) for m in self._members])
            joined = self._joined_inner(family, tables, edges)
        return joined[inner] if inner else joined

    def rows(self, family: str, first: int, last: int) -> NDArray[Any]:
        """Returns all slots over the common records from `first` to `last` - 1."""
        tables = [self._own_rows(member, family, first, last) for member in self._members]
        if family == "agg":
            table = self._joined_table(np.stack(tables).astype(np.float64))
        else:
            edges = np.stack([self._own_rows(m, "agg", first, last) for m in self._members])
            table = self._joined_inner(family, tables, edges)
        return self._without_lost(family, table, first)

    def series(self, family: str, slot: int, *inner: int | slice) -> NDArray[Any]:
        """Returns one slot over all common records, [n, ...]; a "kpi" column is the ranks' mean."""
        if family == "kpi":
            return rank_facts.join_kpi(
                [(member.view, member.records) for member in self._members], slot - SYSTEM_COLUMNS
            )
        if family == "agg":
            columns = self._columns(inner[0] if inner else slice(None))
            joined = [self._series_column(name, slot) for name in columns]
            single = bool(inner) and isinstance(inner[0], int)
            series = joined[0] if single else np.stack(joined, -1)
            return self._without_lost(family, series[:, None], only=slot)[:, 0]
        edges = np.stack([self._own_series(m, "agg", slot)[:, None] for m in self._members])
        own = [self._own_series(member, family, slot)[:, None] for member in self._members]
        table = self._joined_inner(family, own, edges, slot)
        table = self._without_lost(family, table, only=slot)[:, 0]
        return table[(slice(None), *inner)] if inner else table

    def heat(self, family: str, *inner: int | slice) -> NDArray[Any]:
        """Returns one column of all slots over all common records, [n, slots]."""
        if family != "agg" or len(inner) != 1 or not isinstance(inner[0], (int, np.integer)):
            table = self.rows(family, 0, self.n)
            return table[(slice(None), slice(None), *inner)]
        if self._joined is None:
            return np.empty((self.n, 0), np.float32)

        def read(name: str) -> NDArray[np.float64]:
            return np.stack([self._own_heat(member, self._at(name)) for member in self._members])

        joined = self._joined.column(self.meta.columns[int(inner[0])], read)
        return self._without_lost(family, joined)

    def lost(self, family: str, slot: int) -> NDArray[np.bool_] | None:
        """Returns which common records of a slot were found to be damaged on any rank."""
        members = [(m.view, m.records, int(m.ids[slot])) for m in self._members]
        return rank_facts.lost_on_any(members, family)

    def _without_lost(
        self, family: str, table: NDArray[Any], first: int = 0, *, only: int | None = None
    ) -> NDArray[Any]:
        """Returns a table [records, slots, ...] in which nothing is joined of some ranks only."""
        lost = [self.lost(family, s) for s in (range(len(self.slots)) if only is None else [only])]
        return rank_facts.without(table, lost, first)

    # -- joining

    def _at(self, name: str) -> int:
        """Returns the place of a column; KeyError if the run has none of that name."""
        columns = self.meta.columns
        if name not in columns:
            raise KeyError(name)
        return columns.index(name)

    def _columns(self, index: int | slice) -> list[str]:
        names = self.meta.columns
        return names[index] if isinstance(index, slice) else [names[index]]

    def _joined_table(self, tables: NDArray[np.float64]) -> NDArray[np.float32]:
        """Joins tables [ranks, ..., slots, columns] of statistics."""
        if self._joined is None:
            return np.asarray(tables[0], np.float32)
        joined = [
            self._joined.column(name, lambda column: tables[..., self._at(column)])
            for name in self.meta.columns
        ]
        return np.stack(joined, -1)

    def _series_column(self, name: str, slot: int) -> NDArray[np.float32]:
        one = joining.Ranks([[self._own_slot(member, slot)] for member in self._members])

        def read(column: str) -> NDArray[np.float64]:
            at = self._at(column)
            series = [self._own_series(member, "agg", slot, at) for member in self._members]
            return np.stack(series).astype(np.float64)[..., None]

        return one.column(name, read)[..., 0]

    def _joined_inner(
        self,
        family: str,
        tables: Sequence[NDArray[Any]],
        edges: NDArray[np.float32],
        slot: int | None = None,
    ) -> NDArray[Any]:
        """Joins samples or histograms [..., slots, ...], given the statistics beside them."""
        chosen = slice(None) if slot is None else slice(slot, slot + 1)
        slots = self.slots[chosen]
        joints = np.array([joining.how_joined(one) for one in slots], np.int64)
        if family == "smp":
            whole = None
            if (joints == joining.Joint.PIECES).any():
                listed = [[self._own_slot(m, s.id) for s in slots] for m in self._members]
                whole = self._whole(joining.Ranks(listed), edges.astype(np.float64))
            return rank_facts.join_samples(tables, joints, whole)
        return rank_facts.join_counts(tables, edges.astype(np.float64), joints)

    def _whole(self, ranks: joining.Ranks, edges: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns the statistics [..., slots, statistics] of tensors that ranks hold parts of."""
        names = [f"{statistic}.mean" for statistic in self.meta.statistics]
        joined = [ranks.column(name, lambda c: edges[..., self._at(c)]) for name in names]
        return np.stack(joined, -1)

    # -- reading one rank

    def _own_slot(self, member: _Member, slot: int) -> SlotInfo | None:
        own = int(member.ids[slot])
        return None if own < 0 else member.view.slots[own]

    def _own_row(self, member: _Member, family: str, record: int) -> NDArray[Any]:
        return rank_facts.arranged(
            member.view.row(family, int(member.records[record])), member.ids, 0
        )

    def _own_rows(self, member: _Member, family: str, first: int, last: int) -> NDArray[Any]:
        records = member.records[first:last]
        start, stop = (int(records[0]), int(records[-1]) + 1) if len(records) else (0, 0)
        table = member.view.rows(family, start, stop)[records - start]
        return rank_facts.arranged(table, member.ids, 1)

    def _own_series(
        self, member: _Member, family: str, slot: int, *inner: int | slice
    ) -> NDArray[Any]:
        own = int(member.ids[slot])
        if own >= 0:
            return member.view.series(family, own, *inner)[member.records]
        like = member.view.series(family, 0, *inner)[member.records]
        return np.full_like(like, np.nan if like.dtype.kind == "f" else 0)

    def _own_heat(self, member: _Member, column: int) -> NDArray[np.float64]:
        table = member.view.heat("agg", column)[member.records]
        return rank_facts.arranged(table, member.ids, 1).astype(np.float64)

    # -- values

    def value(
        self, record: int, slot: int, sample: int | None = None, part: Part = ...
    ) -> NDArray[Any] | None:
        """Returns a part of a slot's values: of the samples of all ranks, or of the whole tensor.

        No more is read than the part where that is of one sample, or the same on all ranks.
        """
        joint = joining.how_joined(self.slots[slot])
        if joint is joining.Joint.SAMPLES and sample is not None:
            number, own = divmod(sample, max(1, self._count))
            return self._own_value(self._members[number], record, slot, own, part)
        if joint is joining.Joint.COPIES:
            read = (self._own_value(m, record, slot, sample, part) for m in self._members)
            return next((value for value in read if value is not None), None)
        whole = self._whole_value(record, slot, joint)
        if whole is None or (sample is not None and sample >= len(whole)):
            return None
        whole = whole if sample is None else whole[sample]
        box, rest = cut(part, whole.shape)
        return whole[box][rest]

    def _whole_value(self, record: int, slot: int, joint: joining.Joint) -> NDArray[Any] | None:
        parts = [self._own_value(member, record, slot) for member in self._members]
        there = [part for part in parts if part is not None]
        if not there:
            return None
        if joint is joining.Joint.SAMPLES:
            return np.concatenate(there)
        pieces = [self._own_slot(member, slot) for member in self._members]
        return rank_facts.assemble(self.slots[slot].shape, pieces, parts)

    def _own_value(
        self,
        member: _Member,
        record: int,
        slot: int,
        sample: int | None = None,
        part: Part = ...,
    ) -> NDArray[Any] | None:
        if not self._has(member, record, slot):
            return None
        return member.view.value(int(member.records[record]), int(member.ids[slot]), sample, part)

    def value_slots(self, record: int) -> list[int]:
        """Returns the slots of which any rank holds raw values."""
        found: set[int] = set()
        for member in self._members:
            held = member.view.value_slots(int(member.records[record]))
            found.update(np.flatnonzero(np.isin(member.ids, held)).tolist())
        return sorted(found)

    # -- copies that are none

    @cached_property
    def differences(self) -> list[rank_facts.Difference]:
        """Tensors that ought to be the same on all ranks and are not, in some looked-at records."""
        copies = [s for s in self.slots if joining.how_joined(s) is joining.Joint.COPIES]
        ids = [slot.id for slot in copies]
        if not copies or self.n == 0 or len(self._members) < 2:
            return []

        def rows(record: int) -> NDArray[Any]:
            return np.stack([self._own_row(m, "agg", record)[ids] for m in self._members])

        steps = self.records[:, RecordColumn.STEP].astype(np.int64)
        return rank_facts.differing(copies, steps, rows, self.meta.columns)
