"""Iterate over all records of a run, one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import AGGREGATES, PROBE_MODE, SlotInfo, Structure
from comgra_decl.store.layout import RecordColumn
from comgra_decl.store.salvage import TooLargeError

from .snapshot import Snapshot
from .tables import decoded
from .view import RecordView

_BYTES = 32 << 20  # memory limit for the statistics of one chunk


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive records of a run in stored order, without records that a later session replaced.

    `aggregates`: float32 [k, slots, statistics, 3] as in `records.AGGREGATES`, NaN where a record
    lacks the slot. `steps`: int64 [k]. `train`: bool [k]. `structures`: hash of each record's
    graph. `shape_codes`: float32 [k, slots]. The code is 0 where a tensor has the shape given by
    its slot, and 1 + the index in `shapes` otherwise. None if the run does not store shapes.
    """

    snapshot: Snapshot
    records: NDArray[np.int64]
    aggregates: NDArray[np.float32]
    steps: NDArray[np.int64]
    types: list[str]
    train: NDArray[np.bool_]
    structures: list[str | None]
    shape_codes: NDArray[np.float32] | None

    @property
    def slots(self) -> list[SlotInfo]:
        """All slots of the run, including those that first appear in later records."""
        return self.snapshot.view.slots

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that `shape_codes` refer to."""
        return self.snapshot.view.shapes

    @property
    def has_histograms(self) -> bool:
        """Whether the run has histograms."""
        return bool(self.snapshot.view.meta.bins)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Additional facts about each record, such as `records.LOSS_CALLS`; empty where lost."""
        return [self.snapshot.view.extra(int(record)) for record in self.records]

    def structure(self, digest: str) -> Structure | None:
        """Return the graph with the given hash, taken from `structures`; None if it is damaged."""
        return self.snapshot.view.structure(digest)

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return a slot's counts [k, bins] and ranges [k, 2]; None without histograms."""
        if not self.has_histograms:
            return None
        counts, ranges = self._histograms
        return counts[:, slot], ranges[:, slot]

    def samples(self, slot: int) -> NDArray[np.float32] | None:
        """Return the statistics of the recorded samples, [k, samples, statistics], or None."""
        if not self.snapshot.view.meta.sample_count:
            return None
        return self._samples[:, slot]

    def values(self, row: int, slot: int) -> NDArray[Any] | None:
        """Return the values [samples, ...] of a slot in a record.

        None if the record contains none, or if they are damaged (see `Run.damage`).
        """
        try:
            return self.snapshot.view.value(int(self.records[row]), slot)
        except TooLargeError:
            raise
        except DamagedRunError:
            return None

    @cached_property
    def _histograms(self) -> tuple[NDArray[Any], NDArray[Any]]:
        view = self.snapshot.view
        counts, table = _rows(view, "hist", self.records), _rows(view, "agg", self.records)
        ranges = table[..., -2:]
        for slot in range(len(view.slots)):
            lost = view.lost("hist", slot)
            if lost is not None:  # these are fill values, not counts
                ranges[lost[self.records], slot] = np.nan
        return counts, ranges

    @cached_property
    def _samples(self) -> NDArray[Any]:
        return _rows(self.snapshot.view, "smp", self.records)


def chunks(snapshot: Snapshot, *, probes: bool = True) -> Iterator[Chunk]:
    """Yield all records in order, in chunks of limited size; `probes` adds those of probes."""
    view = snapshot.view
    names = len(view.meta.statistics)
    width = max(1, len(view.slots)) * len(view.meta.columns) * 4
    size = int(np.clip(_BYTES // width, 1, 1024))
    modes = decoded(view.records[:, RecordColumn.MODE], view.names("mode"))
    types = decoded(view.records[:, RecordColumn.TYPE], view.names("type"))
    graphs = decoded(view.records[:, RecordColumn.STRUCTURE], view.names("structure"))
    counting = np.flatnonzero(snapshot.counts & (probes | (modes != PROBE_MODE)))
    for start in range(0, len(counting), size):
        records = counting[start : start + size]
        table = _rows(view, "agg", records)
        codes = table[..., view.meta.columns.index("shape")] if view.meta.tells_shapes else None
        table = table[..., : names * len(AGGREGATES)]
        yield Chunk(
            snapshot,
            records,
            table.reshape(*table.shape[:2], names, len(AGGREGATES)),
            snapshot.steps[records],
            [str(name) for name in types[records]],
            modes[records] == "train",
            [None if name is None else str(name) for name in graphs[records]],
            codes,
        )


def _rows(view: RecordView, family: str, records: NDArray[np.int64]) -> NDArray[Any]:
    """Return all slots of the given records, [k, slots, ...]."""
    first, last = int(records[0]), int(records[-1]) + 1
    return view.rows(family, first, last)[records - first]
