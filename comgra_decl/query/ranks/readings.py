"""What was read of the ranks of a run, and what of it could not be, because it is damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lost = NDArray[np.bool_] | None
"""Which elements are missing because they are damaged; None: none of them."""


@dataclass(frozen=True, eq=False)
class Reading:
    """An array, with fill values (NaN; counts: 0) where it is lost."""

    data: NDArray[Any]
    lost: Lost = None

    def __getitem__(self, index: Any) -> Reading:
        """Returns a part of it."""
        return Reading(self.data[index], None if self.lost is None else self.lost[index])


def stacked(readings: Sequence[Reading]) -> Reading:
    """Returns equal readings of several ranks as one: [ranks, ...]."""
    data = np.stack([reading.data for reading in readings])
    if all(reading.lost is None for reading in readings):
        return Reading(data)
    lost = [np.zeros(r.data.shape, bool) if r.lost is None else r.lost for r in readings]
    return Reading(data, np.stack(lost))


class Columns:
    """Columns of the statistics of all ranks, [ranks, ..., slots], each read once.

    Args:
        read: reads one by its name; KeyError if the run has none of that name.
    """

    def __init__(self, read: Callable[[str], Reading]) -> None:
        self._read = read
        self._known: dict[str, Reading] = {}

    def data(self, name: str) -> NDArray[np.float64]:
        """Returns the numbers of a column."""
        return self._column(name).data.astype(np.float64)

    def lost(self, name: str) -> Lost:
        """Returns which of them are missing because they are damaged."""
        return self._column(name).lost

    def _column(self, name: str) -> Reading:
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]
