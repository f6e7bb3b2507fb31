"""Steps with three slots `net.0` to `net.2` and a loss, as triggers receive them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from comgra_decl.keep.step_numbers import Names, StepNumbers
from comgra_decl.records import AGGREGATES, SlotInfo, SlotKey, StepBatch, StepInfo

STATISTICS = ("l2", "nonfinite")
SLOTS = [
    SlotInfo(i, SlotKey(f"net.{i}", "output", 0, "forward"), "computed", "float32", (4, 2), 0, "")
    for i in range(3)
]


def looks_of(
    losses: Sequence[float],
    cuts: Sequence[int],
    *,
    types: Sequence[str] | None = None,
    mode: str = "train",
    counts: NDArray[np.float64] | None = None,
    values: NDArray[np.float64] | None = None,
) -> list[StepNumbers]:
    """Returns steps in chunks that end at `cuts`.

    Args:
        losses: the KPI "loss" of each step.
        cuts: the steps at which a new chunk begins.
        types: types of execution.
        mode: the mode of all steps.
        counts: [steps, slots], non-finite elements (the abs-max over the batch).
        values: [steps, slots], the l2 (its std over the batch).
    """
    k, names = len(losses), Names()
    names.add(SLOTS)
    slots = np.arange(3 if counts is None else counts.shape[1], dtype=np.int32)
    table = np.zeros((k, len(slots), len(STATISTICS), len(AGGREGATES)), np.float32)
    if values is not None:
        table[:, :, 0, AGGREGATES.index("std")] = values
    if counts is not None:
        table[:, :, 1, AGGREGATES.index("abs_max")] = counts
    infos = [StepInfo(i, 0.0, types[i] if types else mode, mode) for i in range(k)]
    edges = sorted({0, k, *(cut for cut in cuts if cut < k)})
    looks = []
    for first, last in pairwise(edges):
        batch = StepBatch(
            steps=infos[first:last],
            slots=slots,
            aggregates=table[first:last],
            samples=np.empty((last - first, len(slots), 0, len(STATISTICS)), np.float32),
            counts=None,
            ranges=None,
            values=[{} for _ in range(last - first)],
            kpis=[{"loss": loss} for loss in losses[first:last]],
            new_slots=[],
            new_structures=[],
        )
        looks.append(StepNumbers(batch, STATISTICS, names))
    return looks


def look_of(losses: Sequence[float]) -> StepNumbers:
    """Returns steps in one chunk."""
    return looks_of(losses, [])[0]
