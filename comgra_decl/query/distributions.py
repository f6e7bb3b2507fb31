"""Read values and histograms of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import edges_of
from comgra_decl.errors import UnknownNameError
from comgra_decl.records import SlotInfo
from comgra_decl.store.parts import Part

from .snapshot import Snapshot, named


def value(
    snapshot: Snapshot,
    slot: SlotInfo,
    step: int,
    *,
    sample: int | None,
    part: Part,
    type_: str | None,
) -> NDArray[Any]:
    """Return part of the values recorded for one sample, or for all samples."""
    record = snapshot.record(step, type_)
    if sample is not None:
        sample = snapshot.sample(sample)
    found = snapshot.view.value(record, slot.id, sample, part)
    if found is None and slot.kind == "loss":
        raise UnknownNameError(
            f"the values of losses are not kept; `run.kpis()` has those of all steps, and "
            f"`run.row({step})` has the statistics of {named(slot)}."
        )
    if found is None:
        what = "" if sample is None else f"sample {sample} of "
        raise UnknownNameError(
            f"no values of {what}{named(slot)} were recorded at step {step}; "
            "set `values: true` for it in the spec, and see `values.max_elements`."
        )
    return found


def histogram(
    snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the counts and edges of a slot's histogram at a step."""
    _check_bins(snapshot)
    view, record = snapshot.view, snapshot.record(step, type_)
    if not view.has_column(record, slot.id) or np.isnan(_facts(snapshot, record, slot)[0]):
        raise UnknownNameError(f"{named(slot)} was not recorded at step {step}.")
    counts = view.row("hist", record, slot.id)
    _, low, high = _facts(snapshot, record, slot)
    return counts.astype(np.int64), edges_of(low, high, len(counts), view.meta.spacing)


def histograms(
    snapshot: Snapshot, slot: SlotInfo, type_: str | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps, counts and edges of all undamaged records that contain the slot."""
    _check_bins(snapshot)
    view, names = snapshot.view, snapshot.view.meta.columns
    records = snapshot.records(type_)
    there = ~np.isnan(view.series("agg", slot.id, names.index("nonfinite.mean"))[records])
    records = records[there]
    ranges = view.series("agg", slot.id, slice(len(names) - 2, len(names)))
    counts = view.series("hist", slot.id)
    lost = view.lost("hist", slot.id)
    if lost is not None:  # these are fill values, not counts
        records = records[~lost[records]]
    ranges, counts = ranges[records], counts[records]
    low, high = ranges.T
    edges = edges_of(low, high, counts.shape[1], view.meta.spacing)
    return snapshot.steps[records], counts.astype(np.int64), edges


def _facts(snapshot: Snapshot, record: int, slot: SlotInfo) -> NDArray[np.float64]:
    """Return (nonfinite, low, high) of a slot in a record."""
    line = snapshot.view.row("agg", record, slot.id)
    column = snapshot.view.meta.columns.index("nonfinite.mean")
    return np.array([line[column], line[-2], line[-1]], np.float64)


def _check_bins(snapshot: Snapshot) -> None:
    if not snapshot.view.meta.bins:
        raise UnknownNameError("this run has no histograms; set `histogram` in the spec.")
