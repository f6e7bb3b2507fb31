"""The input to rules: the records and metrics of a run, in the order in which they were recorded.

Live and stored runs provide the same data, except for their division into windows. Findings must
not depend on this division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, SlotInfo
from comgra_decl.rules.table import SlotTable, elements_of, samples_of

Floats = NDArray[np.float32]

VARYING = ("mean", "std", "min", "max", "abs_mean", "l2")
"""Statistics that distinguish the samples in a batch."""


class Details(Protocol):
    """Parts of records that few rules need, for few slots; read on demand."""

    def histograms(self, slot: int) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Return counts [records, bins] and ranges [records, 2] of a slot, if recorded."""

    def samples(self, slot: int) -> NDArray[Any] | None:
        """Return the statistics of the recorded samples [records, samples, statistics], if any."""

    def values(self, row: int, slot: int) -> NDArray[Any] | None:
        """Return the values [samples, ...] of a slot in a record, if recorded."""


@dataclass(frozen=True)
class Window:
    """Consecutive records (k of them) over all slots known so far (n of them).

    Attributes:
        table: the slots.
        statistics: names of the recorded statistics, in stored order.
        first: number of the first record among all records of its kind.
        steps: int64 [k].
        types: the type of execution of each record.
        train: bool [k]; which records are training records, not evaluation records.
        aggregates: float32 [k, n, statistics, 3]; NaN where a record lacks a slot.
        details: access to everything else.
        histograms: whether the run contains histograms.
        structures: hash of each record's dependency graph; None for records without one.
        shape_codes: float32 [k, n]; 0 where a tensor has the shape in the slot table, otherwise 1
            plus an index into `shapes`. None if all tensors have the shapes in the slot table.
        shapes: the shapes that differ from the slot table.
        facts: additional facts about each record, such as `records.LOSS_CALLS`; may be empty.
        skipped: bool [k]; the records in which mixed precision skipped an optimizer step because a
            gradient was not finite. None if no step was skipped.
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
    shape_codes: Floats | None = None
    shapes: Sequence[tuple[int, ...]] = ()
    facts: Sequence[Mapping[str, Any]] = ()
    _planes: dict[tuple[str, str], Floats] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[int, Window | None] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.steps)

    def spans(self, fact: str) -> Iterator[tuple[Any, int, int]]:
        """Yield each value of a fact with the records [first, stop) in which it is the same.

        Most facts rarely change, so it suffices to look at each value once. Records without the
        fact are left out.
        """
        first, known = 0, None
        for row, facts in enumerate(self.facts):
            value = facts.get(fact)
            if value is known or value == known:
                continue
            if known is not None:
                yield known, first, row
            first, known = row, value
        if known is not None:
            yield known, first, len(self.facts)

    def has(self, *statistics: str) -> bool:
        """Return whether all of these statistics are recorded."""
        return all(name in self.statistics for name in statistics)

    def read(self, statistic: str, at: NDArray[np.int64], over_batch: str = "mean") -> Floats:
        """Return a statistic of the slots `at`, of shape [k, len(at)]."""
        plane = self._planes.get((statistic, over_batch))
        if plane is None:  # many rules read the same statistics, which are far apart in memory
            rank = AGGREGATES.index(over_batch)
            plane = self.aggregates[:, :, self.statistics.index(statistic), rank].copy()
            self._planes[statistic, over_batch] = plane
        return plane[:, at]

    def of_shape(
        self, measure: Callable[[SlotInfo], float], at: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return a quantity computed from the shapes of tensors, of shape [k, len(at)].

        Args:
            measure: computes the quantity for a slot, given its shape in the record. Must be a
                module-level function, because its results are cached per slot table.
            at: the slots.
        """
        own = self.table.remembered(
            (Window, measure), lambda t: np.array([measure(i) for i in t.infos], np.float64)
        )
        found = np.tile(own[at], (len(self), 1))
        if self.shape_codes is None:
            return found
        codes = self.shape_codes[:, at]
        for column in np.flatnonzero((codes > 0).any(0)).tolist():
            mine, info = codes[:, column], self.table.infos[int(at[column])]
            for code in np.unique(mine[mine > 0]).tolist():
                found[mine == code, column] = measure(self._reshaped(info, code))
        return found

    def elements(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of elements per sample (at least 1), of shape [k, len(at)]."""
        return self.of_shape(elements_of, at)

    def samples(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number of samples in the batch, [k, len(at)]; 1 without a batch dimension."""
        return self.of_shape(samples_of, at)

    def variation(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the relative variation across the samples in a batch, of shape [k, len(at)].

        This is the largest standard deviation over the batch of any statistic in `VARYING`,
        relative to the largest magnitude of that statistic. NaN where data are missing or all zero.
        """
        most = np.full((len(self), len(at)), np.nan)
        for name in (name for name in VARYING if self.has(name)):
            size = self.read(name, at, "abs_max")
            varied = np.where(size > 0, self.read(name, at, "std") / size, np.nan)
            most = np.fmax(most, varied)
        return most

    def deviation(self, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the largest standard deviation over the batch of any statistic in `VARYING`.

        Of shape [k, len(at)], in the units of the tensors; NaN where data are missing.
        """
        most = np.full((len(self), len(at)), np.nan)
        for name in (name for name in VARYING if self.has(name)):
            most = np.fmax(most, self.read(name, at, "std"))
        return most

    def reshaped(self, row: int) -> dict[int, SlotInfo]:
        """Return the slots whose shape in a record differs from the slot table."""
        if self.shape_codes is None:
            return {}
        infos, codes = self.table.infos, self.shape_codes[row]
        slots = np.flatnonzero(codes > 0)
        return {slot: self._reshaped(infos[slot], float(codes[slot])) for slot in slots.tolist()}

    def shape(self, row: int, slot: int) -> tuple[int, ...]:
        """Return the full shape of a slot's tensor in a record."""
        code = 0 if self.shape_codes is None else int(self.shape_codes[row, slot])
        return tuple(self.shapes[code - 1]) if code > 0 else self.table.infos[slot].shape

    def _reshaped(self, info: SlotInfo, code: float) -> SlotInfo:
        return replace(info, shape=tuple(self.shapes[int(code) - 1]))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """Which slots each record contains, bool [k, n]."""
        return ~np.isnan(self.aggregates[:, :, self.statistics.index("nonfinite"), 0])

    def every(self, interval: int) -> Window | None:
        """Return every n-th record of the run; None if the window contains none."""
        if interval not in self._parts:  # several rules share an interval
            number = self.first + np.arange(len(self))
            rows = np.flatnonzero(number % interval == 0)
            self._parts[interval] = self.only(rows, int(number[rows[0]])) if len(rows) else None
        return self._parts[interval]

    def only(self, rows: NDArray[np.int64], first: int) -> Window:
        """Return the given records; `first` is the index of the first one."""
        whole = np.array_equal(rows, np.arange(len(self)))
        if whole and first == self.first:
            return self
        return Window(
            self.table,
            self.statistics,
            first,
            self.steps[rows],
            [self.types[row] for row in rows],
            self.train[rows],
            self.aggregates if whole else self.aggregates[rows],
            self.details if whole else _Some(self.details, rows),
            [self.structures[row] for row in rows] if self.structures else [],
            self.histograms,
            None if self.skipped is None else self.skipped[rows],
            None if self.shape_codes is None else self.shape_codes[rows],
            self.shapes,
            [self.facts[row] for row in rows] if self.facts else (),
            self._planes if whole else {},
        )

    def without_skipped(self) -> Window:
        """Return the window without the gradients and updates of skipped steps."""
        if self.skipped is None or not self.skipped.any():
            return self
        aggregates = self.aggregates.copy()
        aggregates[np.ix_(self.skipped, self.table.backward)] = np.nan
        return replace(self, aggregates=aggregates, _planes={}, _parts={})


@dataclass(frozen=True)
class _Some:
    """Details of some of the records."""

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
    """Consecutive values of one metric for one type of execution."""

    name: str
    type: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
