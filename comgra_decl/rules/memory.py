"""Memories of rules: vectors with one entry per slot.

A window of k records and k windows of one record give the same results. All slots of a window are
processed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.finding import since

if TYPE_CHECKING:
    from comgra_decl.rules.table import SlotTable
    from comgra_decl.rules.window import Window

Matrix = NDArray[np.float64]
Bools = NDArray[np.bool_]
Slots = NDArray[np.int64]

NO_SLOTS: Slots = np.zeros(0, np.int64)
"""No slots; used as an initial value."""


def grown(array: NDArray[Any], count: int, fill: Any) -> NDArray[Any]:
    """Return `array` with at least `count` entries in its last dimension."""
    missing = count - array.shape[-1]
    if missing <= 0:
        return array
    widths = [(0, 0)] * (array.ndim - 1) + [(0, missing)]
    return np.pad(array, widths, constant_values=fill)


def row_quantile(values: Matrix, share: float) -> Matrix:
    """Return a quantile of each row, of shape [rows, 1], ignoring NaN, like numpy's `nanquantile`.

    Much faster than numpy for a few rows. NaN where a row contains only NaN.
    """
    ordered = np.sort(values, axis=1)  # NaN come last
    count = values.shape[1] - np.isnan(values).sum(1)
    place = share * np.maximum(count - 1, 0)
    rows, low = np.arange(len(values)), np.floor(place).astype(np.intp)
    high = np.minimum(low + 1, np.maximum(count - 1, 0))
    a, b = ordered[rows, low], ordered[rows, high]
    return np.asarray(a + (place - low) * (b - a))[:, None]


class Streak:
    """Number of consecutive records in which a condition holds; skips records without the slot.

    Attributes, indexed by slot:
        first: the step at which the first streak of `patience` records began; -1 if there is none.
        after: the step of the slot's previous record; -1 if there is none.
        last: the last step of the latest streak.
        worst: the most extreme evidence in any streak.
        worst_step: the step of `worst`.
        records: number of records in streaks. Each streak is counted from its `patience`-th record.
        seen: number of records that contain the slot.
        clean: number of records since the last streak for which the condition is known to be false.
    """

    def __init__(self, patience: int, *, lowest: bool = False) -> None:
        self._patience, self._lowest = patience, lowest
        self._count = np.zeros(0, np.int64)
        self._began = np.zeros(0, np.int64)
        self._began_after = np.zeros(0, np.int64)
        self._newest = np.zeros(0, np.int64)
        self._newest_clean = np.zeros(0, np.int64)
        self.first = np.zeros(0, np.int64)
        self.after = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.records = np.zeros(0, np.int64)
        self.seen = np.zeros(0, np.int64)
        self.clean = np.zeros(0, np.int64)
        self.worst = np.zeros(0)
        self.worst_step = np.zeros(0, np.int64)

    def look(
        self, steps: NDArray[np.int64], at: Slots, *, hit: Bools, present: Bools, evidence: Matrix
    ) -> bool:
        """Process the next records; returns whether any streak is in progress.

        Args:
            steps: the steps of the records, [records].
            at: the slots of the columns.
            hit: where the condition holds, [records, slots].
            present: where the slot was recorded, [records, slots].
            evidence: the value that measures the severity, [records, slots].
        """
        self._grow(int(at.max(initial=-1)) + 1)
        hit = hit & present
        self.seen[at] += present.sum(0)
        newest = self._newest[at]
        latest = np.where(present, steps[:, None], -1).max(0, initial=-1)
        self._newest[at] = np.maximum(newest, latest)
        known_false = present & ~hit & ~np.isnan(evidence)
        at_clean = np.where(known_false, steps[:, None], -1).max(0, initial=-1)
        self._newest_clean[at] = np.maximum(self._newest_clean[at], at_clean)
        if (self.first[at] >= 0).any():
            self.clean[at] += known_false.sum(0)
        if not hit.any() and not self._count[at].any():
            return False
        running = self._running(hit, present, at)
        begins = hit & (running == 1)
        began = _at_latest(begins, steps[:, None], self._began[at])
        after = _at_latest(begins, _steps_before(steps, present, newest), self._began_after[at])
        on = hit & (running >= self._patience)
        self._count[at] = running[-1]
        self._began[at], self._began_after[at] = began[-1], after[-1]
        if not on.any():
            return False
        self._mark(steps, at, on, began, after, evidence, known_false)
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
        after: NDArray[np.int64],
        evidence: Matrix,
        clean: Bools,
    ) -> None:
        column = np.flatnonzero(on.any(0))
        slots, on = at[column], on[:, column]
        new = self.first[slots] < 0
        first_row = on.argmax(0)
        self.first[slots[new]] = began[first_row, column][new]
        self.after[slots[new]] = after[first_row, column][new]
        last_row = len(steps) - 1 - on[::-1].argmax(0)
        self.last[slots] = steps[last_row]
        later = np.arange(len(steps))[:, None] > last_row
        self.clean[slots] = (later & clean[:, column]).sum(0)
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
        for name in ("_count", "records", "seen", "clean"):
            setattr(self, name, grown(getattr(self, name), count, 0))
        steps = ("_began", "_began_after", "_newest", "_newest_clean")
        for name in (*steps, "first", "after", "last", "worst_step"):
            setattr(self, name, grown(getattr(self, name), count, -1))
        self.worst = grown(self.worst, count, np.nan)

    def after_step(self, slot: int) -> int | None:
        """Return `after` of a slot as stored in findings: None if no earlier record is known."""
        after = int(self.after[slot])
        return None if after < 0 else after

    def since(self, slot: int) -> str:
        """Return the period in which a slot has met the condition: "from step 74 on"."""
        return since(int(self.first[slot]), self.after_step(slot))

    @property
    def lasting(self) -> Slots:
        """Slots that had a streak and may still meet the condition.

        A slot no longer meets the condition once the condition has been false for as many records,
        or for as many steps, as it was true before. Steps are counted as well because records
        become less frequent as the run goes on. In both cases, the condition must have been false
        for at least `patience` records.
        """
        held = np.maximum(self.records + self._patience - 1, self._patience)
        longer = self._newest_clean - self.last > self.last - self.first
        free = (self.clean >= held) | (longer & (self.clean >= self._patience))
        return np.flatnonzero((self.first >= 0) & ~free)

    @property
    def fired(self) -> Slots:
        """Slots that ever had a streak of `patience` records."""
        return np.flatnonzero(self.first >= 0)


def _at_latest(begins: Bools, values: NDArray[np.int64], known: Slots) -> NDArray[np.int64]:
    """Return the value at the latest beginning, for each row; before the first, `known`."""
    rows = np.arange(len(begins))[:, None]
    latest = np.maximum.accumulate(np.where(begins, rows, -1), axis=0)
    taken = np.take_along_axis(np.broadcast_to(values, begins.shape), np.maximum(latest, 0), axis=0)
    found: NDArray[np.int64] = np.where(latest < 0, known, taken)
    return found


def _steps_before(steps: NDArray[np.int64], present: Bools, newest: Slots) -> NDArray[np.int64]:
    """Return the step of the slot's previous record, for each record; -1 if there is none."""
    until = np.maximum.accumulate(np.where(present, steps[:, None], -1), axis=0)
    found: NDArray[np.int64] = np.maximum(np.concatenate((newest[None], until[:-1])), newest)
    return found


class Early:
    """Median of each slot's first `count` values, once all of them are known."""

    def __init__(self, count: int) -> None:
        self._size = count
        self._values = np.full((count, 0), np.nan)
        self._taken = np.zeros(0, np.int64)
        self._median = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Process values [records, slots], NaN where missing; returns the medians.

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


class First:
    """First value of each slot."""

    def __init__(self) -> None:
        self._known = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> None:
        """Process values [records, slots], NaN where missing."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        there = ~np.isnan(values)
        new = np.isnan(self._known[at]) & there.any(0)
        first = values[there.argmax(0), np.arange(len(at))]
        self._known[at[new]] = first[new]

    def known(self, at: Slots) -> Matrix:
        """Return the first value of each given slot; NaN if there is none."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        return np.asarray(self._known[at], np.float64)


class Largest:
    """Largest or smallest value of each slot so far, including the current one."""

    def __init__(self, *, smallest: bool = False) -> None:
        self._extreme = np.fmin if smallest else np.fmax
        self._known = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Process values [records, slots]; returns the extreme up to each value, same shape."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        stacked = np.concatenate((self._known[at][None], values))
        until: Matrix = self._extreme.accumulate(stacked, axis=0)[1:]
        if len(until):
            self._known[at] = until[-1]
        return until


class Previous:
    """Previous recorded value of each slot."""

    def __init__(self) -> None:
        self._known = np.zeros(0)

    def look(self, at: Slots, values: NDArray[Any]) -> Matrix:
        """Process values [records, slots], NaN where missing; returns the previous values."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        stacked = np.concatenate((self._known[at][None], values))
        rows = np.arange(len(stacked))[:, None]
        latest = np.maximum.accumulate(np.where(np.isnan(stacked), 0, rows), axis=0)
        filled = np.take_along_axis(stacked, latest, axis=0)
        self._known[at] = filled[-1]
        return np.asarray(filled[:-1], np.float64)

    def known(self, at: Slots) -> Matrix:
        """Return the latest value of each given slot; NaN if there is none."""
        self._known = grown(self._known, int(at.max(initial=-1)) + 1, np.nan)
        return np.asarray(self._known[at], np.float64)


class ClassCounts:
    """Number of times that each class occurs among the targets of a run.

    Counts integer targets of any shape. Floating-point targets are counted if they are zeros and
    ones, with one value per sample. Ignores targets that are indices within the batch (each sample
    is its own class, as in contrastive losses).

    Attributes:
        by_slot: the number of targets of each class, by slot and class.
    """

    fewest = 8
    """Minimum batch size; smaller batches are not counted."""

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, int]] = {}

    def look(self, window: Window) -> None:
        """Add the next records; ignores targets with more classes than histogram bins."""
        for slot in window.table.remembered(ClassCounts, _classes).tolist():
            at = np.array([slot])
            samples = window.samples(at)[:, 0]
            enough = samples >= self.fewest
            if not enough.any():
                continue
            if "float" in window.table.infos[slot].dtype:
                count_binary(self.by_slot.setdefault(slot, {}), window, at, samples * enough)
                continue
            found = window.details.histograms(slot)
            if found is None:
                continue
            counts, ranges = found
            enough &= np.isfinite(ranges).all(1)  # else: this target is missing
            enough &= ~_are_own_classes(counts, ranges, samples)
            _count(self.by_slot.setdefault(slot, {}), counts[enough], ranges[enough])

    @property
    def most(self) -> int:
        """Largest number of targets counted for any slot."""
        return max((sum(known.values()) for known in self.by_slot.values()), default=0)


def _classes(table: SlotTable) -> Slots:
    """Return the slots of targets that may contain classes."""
    integers = table.targets & table.where(lambda i: "int" in i.dtype and bool(i.shape))
    binary = table.where(
        lambda i: "float" in i.dtype and (len(i.shape) == 1 or i.shape[1:] == (1,))
    )
    return np.flatnonzero(integers | (table.targets & binary))


def count_binary(
    known: dict[int, int], window: Window, at: Slots, sizes: NDArray[np.float64]
) -> None:
    """Add the zeros and ones of a target to the numbers of both, unless it has other values.

    Args:
        known: the numbers to which they are added.
        window: the records.
        at: the target's slot, [1].
        sizes: the number of elements in each record.
    """
    if not window.has("mean", "zero_fraction", "abs_max"):
        return
    mean = window.read("mean", at)[:, 0]
    zeros = window.read("zero_fraction", at)[:, 0]
    inside = window.read("abs_max", at, "abs_max")[:, 0] <= 1
    binary = (np.abs(mean - (1 - zeros)) < 1e-5) & inside & (sizes > 0)
    ones = np.rint(mean[binary] * sizes[binary])
    if binary.any():
        known[1] = known.get(1, 0) + int(ones.sum())
        known[0] = known.get(0, 0) + int((sizes[binary] - ones).sum())


def _are_own_classes(
    counts: NDArray[np.int_], ranges: NDArray[np.float64], samples: NDArray[np.float64]
) -> Bools:
    """Return a bool mask [k] of the records whose targets are 0 .. samples - 1, each once."""
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
