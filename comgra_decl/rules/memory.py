"""What rules remember of each slot: vectors indexed by slot number.

Each memory returns the same numbers for one window of k records as for k windows of one record,
and processes all slots of a window at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from comgra_decl.rules.table import SlotTable
    from comgra_decl.rules.window import Window

Matrix = NDArray[np.float64]
Bools = NDArray[np.bool_]
Slots = NDArray[np.int64]

NO_SLOTS: Slots = np.zeros(0, np.int64)
"""No slots, as a start value."""


def grown(array: NDArray[Any], count: int, fill: Any) -> NDArray[Any]:
    """Returns `array` with at least `count` entries in its last dimension."""
    missing = count - array.shape[-1]
    if missing <= 0:
        return array
    widths = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
    return np.pad(array, widths, constant_values=fill)


def row_quantile(values: Matrix, share: float) -> Matrix:
    """Returns a quantile of each row [rows, 1], ignoring NaN, as numpy's `nanquantile` does.

    Much faster than that for a few rows. NaN where a row has no number.
    """
    ordered = np.sort(values, axis=1)  # NaN last
    count = values.shape[1] - np.isnan(values).sum(1)
    place = share * np.maximum(count - 1, 0)
    rows, low = np.arange(len(values)), np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(count - 1, 0))
    a, b = ordered[rows, low], ordered[rows, high]
    return np.asarray(a + (place - low) * (b - a))[:, None]


class Streak:
    """How many records in a row a condition holds; records without the slot are skipped.

    Attributes, indexed by slot:
        first: the step at which the first streak of `patience` records began; -1 if there was none.
        last: the last step of any streak.
        worst: the most extreme evidence within a streak.
        worst_step: the step of `worst`.
        records: the number of records in streaks, counted from the `patience`-th record of each.
        seen: the number of records that have the slot.
    """

    def __init__(self, patience: int, *, lowest: bool = False) -> None:
        self._patience, self._lowest = patience, lowest
        self._count = np.zeros(0, np.int64)
        self._began = np.zeros(0, np.int64)
        self.first = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.records = np.zeros(0, np.int64)
        self.seen = np.zeros(0, np.int64)
        self.worst = np.zeros(0)
        self.worst_step = np.zeros(0, np.int64)

    def look(
        self, steps: NDArray[np.int64], at: Slots, *, hit: Bools, present: Bools, evidence: Matrix
    ) -> bool:
        """Takes the next records; returns whether any streak is on.

        Args:
            steps: of the records, [records].
            at: the slots of the columns.
            hit: where the condition holds, [records, slots].
            present: where the slot was recorded, [records, slots].
            evidence: the number that measures how bad it is, [records, slots].
        """
        self._grow(int(at.max(initial=-1)) + 1)
        hit = hit & present
        self.seen[at] += present.sum(0)
        if not hit.any() and not self._count[at].any():
            return False
        running = self._running(hit, present, at)
        begins = np.where(hit & (running == 1), steps[:, None], -1)
        began = np.maximum.accumulate(begins, axis=0)
        began = np.where(began < 0, self._began[at], began)
        on = hit & (running >= self._patience)
        self._count[at], self._began[at] = running[-1], began[-1]
        if not on.any():
            return False
        self._mark(steps, at, on, began, evidence)
        return True

    def _running(self, hit: Bools, present: Bools, at: Slots) -> NDArray[np.int64]:
        total = np.cumsum(hit, axis=0)
        ended = np.maximum.accumulate(np.where(present & ~hit, total, -1), axis=0)
        running: NDArray[np.int64] = np.where(ended < 0, total + self._count[at], total - ended)
        return running

    def _mark(
        self,
        steps: NDArray[np.int64],
        at: Slots,
        on: Bools,
        began: NDArray[np.int64],
        evidence: Matrix,
    ) -> None:
        column = np.flatnonzero(on.any(0))
        slots, on = at[column], on[:, column]
        new = self.first[slots] < 0
        first_row = on.argmax(0)
        firsts = began[first_row, column]
        self.first[slots[new]] = firsts[new]
        self.last[slots] = steps[len(steps) - 1 - on[::-1].argmax(0)]
        self.records[slots] += on.sum(0)
        self._extreme(steps, slots, np.where(on, evidence[:, column], np.nan))

    def _extreme(self, steps: NDArray[np.int64], slots: Slots, evidence: Matrix) -> None:
        sign = -1.0 if self._lowest else 1.0
        scored = np.where(np.isnan(evidence), -np.inf, sign * evidence)
        row = scored.argmax(0)
        best = scored[row, np.arange(len(slots))]
        known = np.where(np.isnan(self.worst[slots]), -np.inf, sign * self.worst[slots])
        better = best > known
        self.worst[slots[better]] = sign * best[better]
        self.worst_step[slots[better]] = steps[row[better]]

    def _grow(self, count: int) -> None:
        if count <= len(self.first):
            return
        for name in ("_count", "records", "seen"):
            setattr(self, name, grown(getattr(self, name), count, 0))
        for name in ("_began", "first", "last", "worst_step"):
            setattr(self, name, grown(getattr(self, name), count, -1))
        self.worst = grown(self.worst, count, np.nan)

    @property
    def fired(self) -> Slots:
        """The slots that ever had a streak of `patience` records."""
        return np.flatnonzero(self.first >= 0)


class Early:
    """The median of each slot's first `count` values, once they are known."""

    def __init__(self, count: int) -> None:
        self._size = count
        self._values = np.full((count, 0), np.nan)
        self._taken = np.zeros(0, np.int64)
        self._median = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Takes values [records, slots], NaN where missing; returns the median, same shape.

        The result is NaN up to and including the `count`-th value.
        """
        width = int(at.max(initial=-1)) + 1
        if width > len(self._taken):
            self._values = grown(self._values, width, np.nan)
            self._taken = grown(self._taken, width, 0)
            self._median = grown(self._median, width, np.nan)
        known = self._taken[at]
        if not len(values) or (known >= self._size).all():
            return np.broadcast_to(self._median[at], values.shape)
        rank = known + np.cumsum(~np.isnan(values), axis=0)
        row, column = np.nonzero(~np.isnan(values) & (rank <= self._size))
        self._values[rank[row, column] - 1, at[column]] = values[row, column]
        self._taken[at] = np.minimum(rank[-1], self._size)
        new = at[(known < self._size) & (rank[-1] >= self._size)]
        self._median[new] = np.median(self._values[:, new], axis=0)
        return np.where(rank > self._size, self._median[at], np.nan)


class Largest:
    """The largest value of each slot so far, including the current one; or the smallest."""

    def __init__(self, *, smallest: bool = False) -> None:
        self._extreme = np.fmin if smallest else np.fmax
        self._known = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Takes values [records, slots]; returns the extreme up to each of them, same shape."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        stacked = np.concatenate((self._known[at][None], values))
        until: Matrix = self._extreme.accumulate(stacked, axis=0)[1:]
        if len(until):
            self._known[at] = until[-1]
        return until


class Previous:
    """The previous recorded value of each slot."""

    def __init__(self) -> None:
        self._known = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Takes values [records, slots], NaN where missing; returns the ones before, same shape."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        stacked = np.concatenate((self._known[at][None], values))
        rows = np.arange(len(stacked))[:, None]
        latest = np.maximum.accumulate(np.where(np.isnan(stacked), 0, rows), axis=0)
        filled = np.take_along_axis(stacked, latest, axis=0)
        self._known[at] = filled[-1]
        return np.asarray(filled[:-1], np.float64)

    def known(self, at: Slots) -> Matrix:
        """Returns the latest value of each of the slots; NaN if there is none."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        return np.asarray(self._known[at], np.float64)


class ClassCounts:
    """How often each class occurs among the targets of a run.

    Counted are targets that are integers, however shaped, and those that are floating-point zeros
    and ones, one per sample. Targets that are indices of the batch itself (each sample its own
    class, as in contrastive losses) are left out.

    Attributes:
        by_slot: the number of targets of each class, by slot and class.
    """

    fewest = 8
    """Smaller batches are not counted."""

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, int]] = {}

    def look(self, window: Window) -> None:
        """Adds the next records; targets with more classes than histogram bins are left out."""
        for slot in window.table.remembered(ClassCounts, _classes).tolist():
            found = window.details.histograms(slot)
            at = np.array([slot])
            samples = window.samples(at)[:, 0]
            enough = samples >= self.fewest
            if found is None or not enough.any():
                continue
            counts, ranges = found
            enough &= np.isfinite(ranges).all(1)  # otherwise the record lacks this target
            if "float" in window.table.infos[slot].dtype:
                enough &= _are_binary(window, at)
            else:
                enough &= ~_are_own_classes(counts, ranges, samples)
            _count(self.by_slot.setdefault(slot, {}), counts[enough], ranges[enough])

    @property
    def most(self) -> int:
        """The largest number of targets counted for any slot."""
        return max((sum(known.values()) for known in self.by_slot.values()), default=0)


def _classes(table: SlotTable) -> Slots:
    """Returns the slots of targets that may be classes."""
    integers = table.targets & table.where(lambda i: "int" in i.dtype and bool(i.shape))
    binary = table.where(lambda i: "float" in i.dtype and len(i.shape) in (1, 2))
    single = table.where(lambda i: len(i.shape) == 1 or i.shape[-1:] == (1,))
    return np.flatnonzero(integers | (table.targets & binary & single))


def _are_binary(window: Window, at: Slots) -> Bools:
    """Whether the targets of each record are zeros and ones, bool [k]."""
    if not window.has("mean", "zero_fraction", "abs_max"):
        return np.zeros(len(window), np.bool_)
    ones = window.read("mean", at) - (1 - window.read("zero_fraction", at))
    inside = window.read("abs_max", at, "abs_max") <= 1
    return np.asarray((np.abs(ones) < 1e-5) & inside)[:, 0]


def _are_own_classes(
    counts: NDArray[np.int_], ranges: NDArray[np.float64], samples: NDArray[np.float64]
) -> Bools:
    """Whether the targets of each record are 0 .. samples - 1, each once, bool [k]."""
    whole = (ranges[:, 0] == 0) & (ranges[:, 1] == samples - 1) & (counts.sum(1) == samples)
    per_bin = samples[:, None] / counts.shape[1]
    return np.asarray(whole & (np.abs(counts - per_bin) <= 1).all(1))


def _count(known: dict[int, int], counts: NDArray[np.int_], ranges: NDArray[np.float64]) -> None:
    if not len(ranges):
        return
    if not (ranges == ranges[:1]).all():  # batches nearly always have the same range of classes
        for row, ends in zip(counts, ranges, strict=True):
            _count(known, row[None], ends[None])
        return
    (low, high), total = ranges[0].tolist(), counts.sum(0)
    if not total.any() or high - low > len(total):
        return
    width = (high - low) / len(total)
    bins = np.flatnonzero(total)
    classes = np.rint(low + (bins + 0.5) * width).astype(int)
    for number, count in zip(classes.tolist(), total[bins].tolist(), strict=True):
        known[number] = known.get(number, 0) + count
