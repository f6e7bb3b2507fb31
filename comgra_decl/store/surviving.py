"""Numeric facts of records, read from any of their three copies.

The copies are the large chunks of `records`, blocks and rows. If the facts of a record are
unreadable in all copies, the record is lost. It is reported and omitted, so that the other records
remain readable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError

from .layout import RECORDS_ARRAY, RECORDS_CHUNK, SYSTEM_COLUMNS, RecordColumn

Facts = NDArray[np.float64]
Read = Callable[[str, slice], Facts]
"""Reads the facts of some records from an array, as [records, SYSTEM_COLUMNS]."""

LOST = -1.0
"""Step of a record whose facts are lost."""

_AT_ONCE = 16 * RECORDS_CHUNK
"""Number of records that are read at once, so that a long run is not in memory twice."""

_MOST_LOST = 2000
"""Number of lost records after which reading stops. Checking an entire run would take minutes."""

_NONE = {
    RecordColumn.STEP: LOST,
    RecordColumn.TIME: np.nan,
    RecordColumn.COST: np.nan,
    RecordColumn.TYPE: -1.0,
    RecordColumn.MODE: -1.0,
    RecordColumn.STRUCTURE: -1.0,
    RecordColumn.BATCH_SIZE: -1.0,
}


class FactsReader:
    """Reads facts of records in as few reads as the damage allows."""

    def __init__(self, read: Read, block: int) -> None:
        self._read = read
        self._copies = ((RECORDS_ARRAY, RECORDS_CHUNK), ("kpi/blk", block), ("kpi/row", 1))
        self.damage: list[str] = []

    def facts(self, first: int, last: int) -> Iterator[Facts]:
        """Yield the facts of records [first, last), in parts."""
        at = first
        for level, (_, chunk) in enumerate(self._copies):
            edge = last // chunk * chunk
            for start in range(at, edge, _AT_ONCE):
                yield from self._whole(level, start, min(start + _AT_ONCE, edge))
            at = max(at, edge)

    def _whole(self, level: int, first: int, last: int) -> list[Facts]:
        """Read records in whole chunks of a copy, falling back to other copies where damaged."""
        name, chunk = self._copies[level]
        try:
            return [self._read(name, slice(first, last))]
        except DamagedRunError as error:
            bounds = _bounds(first, last, chunk)
            if len(bounds) > 1:
                return [part for low, high in bounds for part in self._whole(level, low, high)]
            if level + 1 < len(self._copies):
                return self._whole(level + 1, first, last)
            self.damage.append(f"record {first} is lost: {error}")
            if len(self.damage) > _MOST_LOST:
                raise DamagedRunError(
                    f"more than {_MOST_LOST} records are lost; the first: {self.damage[0]}"
                ) from error
            return [_lost(last - first)]


def _bounds(first: int, last: int, chunk: int) -> Sequence[tuple[int, int]]:
    """Split records at chunk edges."""
    edges = [first, *range((first // chunk + 1) * chunk, last, chunk), last]
    return list(pairwise(edges))


def _lost(count: int) -> Facts:
    facts = np.zeros((count, SYSTEM_COLUMNS))
    for column, value in _NONE.items():
        facts[:, column] = value
    return facts
