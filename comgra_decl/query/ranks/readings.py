"""Arrays read from the ranks of a run, with masks of the damaged elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lost = NDArray[np.bool_] | None
"""Mask of the elements that are missing because they are damaged; None if none are."""


@dataclass(frozen=True, eq=False)
class Reading:
    """An array with fill values where data is lost: NaN, or 0 for counts."""

    data: NDArray[Any]
    lost: Lost = None

    def __getitem__(self, index: Any) -> Reading:
        """Return a part of the reading."""
        return Reading(self.data[index], None if self.lost is None else self.lost[index])


def stacked(readings: Sequence[Reading | None]) -> Reading:
    """Stack readings with the same shape from multiple ranks: [ranks, ...].

    Args:
        readings: those of each rank; fill values replace None, but at least one must be given.
    """
    first = next(reading.data for reading in readings if reading is not None)
    data = np.full(
        (len(readings), *first.shape), np.nan if first.dtype.kind == "f" else 0, first.dtype
    )
    lost: Lost = None
    for rank, reading in enumerate(readings):
        if reading is None:
            continue
        data[rank] = reading.data
        if reading.lost is not None:
            lost = np.zeros(data.shape, bool) if lost is None else lost
            lost[rank] = reading.lost
    return Reading(data, lost)


class Columns:
    """Columns of the statistics from all ranks, [ranks, ..., slots]; each column is read once.

    Args:
        read: reads a column by its name; raises KeyError if the run lacks it.
    """

    def __init__(self, read: Callable[[str], Reading]) -> None:
        self._read = read
        self._known: dict[str, Reading] = {}

    def data(self, name: str) -> NDArray[np.float64]:
        """Return the values of a column."""
        return self.reading(name).data.astype(np.float64)

    def lost(self, name: str) -> Lost:
        """Return a mask of the values of a column that are missing because they are damaged."""
        return self.reading(name).lost

    @property
    def losses(self) -> list[Lost]:
        """Masks of the damaged values in what was read so far."""
        return [found.lost for found in self._known.values()]

    def reading(self, name: str) -> Reading:
        """Return a column as it was read."""
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]
