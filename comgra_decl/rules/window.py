"""What rules see of a run: records and numbers in the order in which they were made.

A run that is being recorded and one that is read from disk come in the same form, cut into
windows differently. Whatever a rule finds must not depend on the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES
from comgra_decl.rules.table import SlotTable

Floats = NDArray[np.float32]


class Details(Protocol):
    """What few rules look at, of few slots; read when asked for."""

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Returns counts [k, bins] and ranges [k, 2] of a slot, None without histograms."""

    def samples(self, slot: int) -> NDArray[Any] | None:
        """Returns the statistics of the recorded samples [k, samples, statistics], if any."""

    def values(self, row: int, slot: int) -> NDArray[Any] | None:
        """Returns the values [samples, ...] that a record holds of a slot, if it does."""


@dataclass(frozen=True)
class Window:
    """`k` consecutive records over all `n` slots known so far.

    Attributes:
        table: the slots.
        statistics: names of the recorded statistics, in stored order.
        first: number of the first record among all of its kind.
        steps: int64 [k].
        types: type of execution of each record.
        train: bool [k], which records are of the training and not of an evaluation.
        aggregates: float32 [k, n, statistics, 3]; NaN where a slot is not in a record.
        details: the rest.
        histograms: whether the run has histograms.
        structures: hash of each record's dependency graph, None where none was followed.
        skipped: bool [k], in which steps mixed precision let an optimizer not step, because a
            gradient was not finite; None: in none.
    """

    table: SlotTable
    statistics: tuple[str, ...]
    first: int
    steps: NDArray[np.int64]
    types: list[str]
    train: NDArray[np.bool_]
    aggregates: Floats
    details: Details
    structures: list[str | None] = field(default_factory=list)
    histograms: bool = False
    skipped: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def has(self, *statistics: str) -> bool:
        """Whether all of these statistics are recorded."""
        return all(name in self.statistics for name in statistics)

    def read(self, statistic: str, at: NDArray[np.int64], over_batch: str = "mean") -> Floats:
        """Returns one statistic of the slots `at`, [k, len(at)]."""
        rank = AGGREGATES.index(over_batch)
        return self.aggregates[:, at, self.statistics.index(statistic), rank]

    @cached_property
    def there(self) -> NDArray[np.bool_]:
        """Which slots each record has, [k, n]."""
        return ~np.isnan(self.aggregates[:, :, self.statistics.index("nonfinite"), 0])

    def only(self, rows: NDArray[np.int64], first: int) -> Window:
        """Returns some of the records, `first` being the number of the first of them."""
        return Window(
            self.table,
            self.statistics,
            first,
            self.steps[rows],
            [self.types[row] for row in rows],
            self.train[rows],
            self.aggregates if len(rows) == len(self) else self.aggregates[rows],
            self.details if len(rows) == len(self) else _Some(self.details, rows),
            [self.structures[row] for row in rows] if self.structures else [],
            self.histograms,
            None if self.skipped is None else self.skipped[rows],
        )

    def without_skipped(self) -> Window:
        """Returns the same without the gradients and updates of skipped steps: nobody used them."""
        if self.skipped is None or not self.skipped.any():
            return self
        aggregates = self.aggregates.copy()
        aggregates[np.ix_(self.skipped, self.table.backward)] = np.nan
        return replace(self, aggregates=aggregates)


@dataclass(frozen=True)
class _Some:
    """The details of some of the records."""

    details: Details
    rows: NDArray[np.int64]

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        found = self.details.histograms(slot)
        return None if found is None else (found[0][self.rows], found[1][self.rows])

    def samples(self, slot: int) -> NDArray[Any] | None:
        found = self.details.samples(slot)
        return None if found is None else found[self.rows]

    def values(self, row: int, slot: int) -> NDArray[Any] | None:
        return self.details.values(int(self.rows[row]), slot)


@dataclass(frozen=True)
class Numbers:
    """Some numbers of one name and type of execution, in the order in which they were said."""

    name: str
    type: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
