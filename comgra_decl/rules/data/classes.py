"""How often each class occurs among the targets, by the histograms of records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.memory import Slots
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Window

FEWEST = 8
"""Targets of smaller batches tell nothing."""


class ClassCounts:
    """Counts the classes in targets that are integers, one per sample."""

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, int]] = {}

    def look(self, window: Window) -> None:
        """Adds the next records; those with more classes than bins are left out."""
        for slot in window.table.remembered(ClassCounts, _classes).tolist():
            found = window.details.histograms(slot)
            enough = window.samples(np.array([slot]))[:, 0] >= FEWEST
            if found is not None and enough.any():
                counts, ranges = found
                enough &= np.isfinite(ranges).all(1)  # else the record has no such target
                _count(self.by_slot.setdefault(slot, {}), counts[enough], ranges[enough])

    @property
    def most(self) -> int:
        """Targets that were counted, of the slot with most."""
        return max((sum(known.values()) for known in self.by_slot.values()), default=0)


def targets(table: SlotTable, *, one: bool = False) -> Mask:
    """Returns targets of samples; `one`: with one number per sample."""
    return table.where(
        lambda i: (
            i.kind == "target"
            and i.key.pass_ == "forward"
            and i.batch_dim is not None
            and (not one or len(i.shape) == 1)
        )
    )


def _classes(table: SlotTable) -> Slots:
    wanted = targets(table, one=True) & table.where(lambda info: "int" in info.dtype)
    return np.flatnonzero(wanted)


def _count(known: dict[int, int], counts: NDArray[np.int_], ranges: NDArray[np.float64]) -> None:
    if not len(ranges):
        return
    if not (ranges == ranges[:1]).all():  # nearly always all batches have the same classes
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
