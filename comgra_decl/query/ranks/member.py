"""Read one rank of a run. Slots and records are addressed by their joint numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import SlotInfo, StoredPreview
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.parts import Part
from comgra_decl.store.view import View

from .readings import Lost, Reading


@dataclass(frozen=True, eq=False)
class Member:
    """A rank's view, with its slot ids (-1: none) and record numbers by joint slot and record."""

    view: View
    ids: NDArray[np.int64]
    records: NDArray[np.int64]

    def holds(self, slots: slice) -> bool:
        """Whether the rank has any of some slots."""
        return bool((self.ids[slots] >= 0).any())

    def slot(self, slot: int) -> SlotInfo | None:
        """Return the rank's own slot, or None."""
        own = int(self.ids[slot])
        return None if own < 0 else self.view.slots[own]

    def has(self, record: int, slot: int) -> bool:
        """Whether the slot existed on this rank when the record was written."""
        own = int(self.ids[slot])
        return own >= 0 and self.view.has_column(int(self.records[record]), own)

    def existed(self, records: slice, slots: slice) -> NDArray[np.bool_]:
        """Return which slots existed on this rank when records were written, [records, slots]."""
        ids = self.ids[slots]
        widths = self.view.records[self.records[records], RecordColumn.WIDTH]
        return np.asarray((ids >= 0) & (ids < widths[:, None]))

    def row(self, family: str, record: int) -> Reading:
        """Return the array that a record stores for a family, [slots, ...]."""
        own = int(self.records[record])
        try:
            data = self.view.row(family, own)
        except DamagedRunError:
            return self.rows(family, record, record + 1)[0]
        lost = self.view.lost_in(family, slice(own, own + 1), slice(0, len(data)))
        gone = None if lost is None else _arranged(lost[0], self.ids, 0)
        return Reading(_arranged(data, self.ids, 0), gone)

    def rows(self, family: str, first: int, last: int) -> Reading:
        """Return all slots over the joint records `first` to `last` - 1."""
        records = self.records[first:last]
        start, stop = (int(records[0]), int(records[-1]) + 1) if len(records) else (0, 0)
        data = self.view.rows(family, start, stop)[records - start]
        lost = self.view.lost_in(family, slice(start, stop), slice(0, len(self.view.slots)))
        gone = None if lost is None else _arranged(lost[records - start], self.ids, 1)
        return Reading(_arranged(data, self.ids, 1), gone)

    def series(self, family: str, slot: int, *inner: int | slice) -> Reading:
        """Return one slot that the rank has over all joint records, [n, ...]."""
        own = int(self.ids[slot])
        data = self.view.series(family, own, *inner)[self.records]
        lost = self.view.lost_in(family, slice(0, self.view.n), own, *inner)
        return Reading(data, None if lost is None else lost[self.records])

    def tile(self, column: int, records: slice, slots: slice) -> Reading:
        """Return one column of statistics over some joint records and slots, [records, slots]."""
        mine, ids = self.records[records], self.ids[slots]
        there = ids[ids >= 0]
        rows = slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else slice(0, 0)
        own = slice(int(there.min()), int(there.max()) + 1) if len(there) else slice(0, 0)
        data = self.view.tile(column, rows, own)[mine - rows.start]
        lost = self.view.lost_in("agg", rows, own, column)
        ids = np.where(ids < 0, -1, ids - own.start)
        gone = None if lost is None else _arranged(lost[mine - rows.start], ids, 1)
        return Reading(_arranged(data, ids, 1), gone)

    def samples(self, record: int) -> tuple[list[int], int]:
        """Return the places of the recorded samples in the rank's batch, and the batch's size."""
        own = int(self.records[record])
        return self.view.samples(own), int(self.view.records[own, RecordColumn.BATCH_SIZE])

    def lost(self, family: str, slot: int) -> Lost:
        """Return a mask of the joint records in which a slot was found damaged."""
        own = int(self.ids[slot])
        lost = None if own < 0 else self.view.lost(family, own)
        return None if lost is None else lost[self.records]

    def value(
        self, record: int, slot: int, sample: int | None = None, part: Part = ...
    ) -> NDArray[Any] | None:
        """Return part of a slot's values on this rank; see `View.value`."""
        if not self.has(record, slot):
            return None
        return self.view.value(int(self.records[record]), int(self.ids[slot]), sample, part)

    def preview(self, record: int, slot: int) -> StoredPreview | None:
        """Return a slot's preview on this rank; see `View.preview`."""
        if not self.has(record, slot):
            return None
        return self.view.preview(int(self.records[record]), int(self.ids[slot]))


def _arranged(table: NDArray[Any], ids: NDArray[np.int64], axis: int) -> NDArray[Any]:
    """Return a rank's table with its slots in joint order; missing slots are NaN (counts: 0)."""
    shape = [*table.shape]
    there = (ids >= 0) & (ids < shape[axis])
    shape[axis] = len(ids)
    out = np.full(shape, np.nan if table.dtype.kind == "f" else 0, table.dtype)
    index: list[Any] = [slice(None)] * table.ndim
    index[axis] = np.flatnonzero(there)
    out[tuple(index)] = table.take(ids[there], axis=axis)
    return out
