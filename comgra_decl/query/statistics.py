"""Tables of statistics over steps, slots and samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.records import SlotInfo
from comgra_decl.spec.globs import matches

from . import arrays, derived
from .snapshot import Snapshot, aggregate, named
from .unusual import distances

LEVELS = ("node", "role", "iteration", "pass")
"""Index levels that identify a slot in every table of slots."""


def series(
    snapshot: Snapshot, slot: SlotInfo, statistic: str, over_batch: str, type_: str | None
) -> pd.Series[float]:
    """Return a statistic of a slot by step."""
    records = snapshot.records(type_)
    if is_one_of(statistic, derived.NAMES):
        values = _ratios(snapshot, slot, over_batch)[records]
    else:
        column = snapshot.column(statistic, over_batch)
        values = snapshot.view.series("agg", slot.id, column)[records]
    return pd.Series(values, index=snapshot.step_index(records), name=statistic)


def extremes(
    snapshot: Snapshot, slot: SlotInfo, statistic: str, over_batch: str, type_: str | None
) -> pd.DataFrame:
    """Return the lowest and highest values of a slot in spans of records; see `Slot.extremes`."""
    ids = np.array([slot.id], np.int64)
    found = arrays.extremes(snapshot, statistic, ids, over_batch, type_)
    columns = {
        "low": found.low[:, 0],
        "low_step": found.low_steps[:, 0],
        "high": found.high[:, 0],
        "high_step": found.high_steps[:, 0],
    }
    return pd.DataFrame(columns, pd.Index(found.steps, name="step"))


def chosen_slots(
    snapshot: Snapshot, *, nodes: str | Sequence[str], of: str | None
) -> list[SlotInfo]:
    """Return the slots of a pass whose nodes match one of the globs.

    Args:
        snapshot: the records.
        nodes: the globs.
        of: the pass; None: all passes.

    Raises:
        UnknownNameError: the pass does not exist, or no node matches a glob.
    """
    known, patterns = snapshot.view.slots, [nodes] if isinstance(nodes, str) else [*nodes]
    passes = list(dict.fromkeys(slot.key.pass_ for slot in known))
    if of is not None and not is_one_of(of, passes):
        hint = did_you_mean(of, passes) or "."
        raise UnknownNameError(f"{shown(of)} is not a pass of this run{hint} It has {passes}.")
    for pattern in patterns:
        if not any(matches(pattern, node) for node in snapshot.nodes):
            hint = did_you_mean(pattern, snapshot.nodes) or "."
            raise UnknownNameError(f"no node matches {shown(pattern)}{hint} See `run.nodes`.")
    return [
        slot
        for slot in known
        if of in (None, slot.key.pass_) and any(matches(p, slot.key.node) for p in patterns)
    ]


def long(
    snapshot: Snapshot,
    names: Sequence[str],
    *,
    nodes: str | Sequence[str],
    of: str | None,
    over_batch: str,
    type_: str | None,
) -> pd.DataFrame:
    """Return statistics as a table with one row per record and tensor; see `Run.table`."""
    slots = chosen_slots(snapshot, nodes=nodes, of=of)
    records = snapshot.records(type_)
    there = _block(snapshot, "nonfinite", slots, "mean")[records]
    rows, columns = np.nonzero(~np.isnan(there))
    keys = [slots[i].key for i in range(len(slots))]
    content: dict[str, Any] = {"step": snapshot.steps[records[rows]]}
    for name, field in zip(LEVELS, ("node", "role", "iteration", "pass_"), strict=True):
        values = np.array([getattr(key, field) for key in keys], object)
        content[name] = values[columns] if len(keys) else values
    content["iteration"] = content["iteration"].astype(np.int64)
    for name in names:
        content[name] = _block(snapshot, name, slots, over_batch)[records][rows, columns]
    return pd.DataFrame(content)


_FEW = 0.25
"""Share of a run's slots up to which they are read one by one, and not all together."""


def _block(
    snapshot: Snapshot, name: str, slots: Sequence[SlotInfo], over_batch: str
) -> NDArray[np.float32]:
    """Return a statistic [records, slots] of some slots in all records."""
    few = len(slots) <= _FEW * len(snapshot.view.slots)
    if few and slots and not is_one_of(name, derived.NAMES):
        column = snapshot.column(name, over_batch)
        return np.stack([snapshot.view.series("agg", s.id, column) for s in slots], axis=1)
    ids = np.array([slot.id for slot in slots], np.int64)
    return arrays.table(snapshot, name, over_batch)[:, ids]


def shape_series(snapshot: Snapshot, slot: SlotInfo, type_: str | None) -> pd.Series[Any]:
    """Return the shape of a slot by step, for the records that have it."""
    records, view = snapshot.records(type_), snapshot.view
    names = view.meta.columns
    there = view.series("agg", slot.id, names.index("nonfinite.mean"))[records]
    records = records[~np.isnan(there)]
    codes = np.zeros(view.n)
    if view.meta.tells_shapes:
        codes = view.series("agg", slot.id, names.index("shape"))
    found = [view.shape(slot.id, code) for code in codes[records].tolist()]
    return _shapes(found, snapshot.step_index(records))


def shapes(snapshot: Snapshot, step: int, type_: str | None) -> pd.Series[Any]:
    """Return the shapes of the slots in a record, indexed by name."""
    found = arrays.shapes(snapshot, step, type_)
    return _shapes([*found.values()], named_index(snapshot, [*found]))


def named_index(snapshot: Snapshot, ids: Iterable[int]) -> pd.MultiIndex:
    """Return an index with the names of slots: (node, role, iteration, pass)."""
    slots = snapshot.view.slots
    return pd.MultiIndex.from_tuples([tuple(slots[i].key) for i in ids], names=LEVELS)


def _shapes(found: list[tuple[int, ...] | None], index: pd.Index[Any]) -> pd.Series[Any]:
    cells = np.empty(len(found), object)
    cells[:] = found  # pandas would turn a list of tuples into columns
    return pd.Series(cells, index=index, name="shape")


def shape(
    snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None
) -> tuple[int, ...] | None:
    """Return the shape of a slot at a step.

    Raises:
        UnknownNameError: the slot was not recorded at this step.
    """
    known = arrays.shapes(snapshot, step, type_)
    if slot.id not in known:
        raise UnknownNameError(f"{named(slot)} was not recorded at step {step}.")
    return known[slot.id]


def sample_series(
    snapshot: Snapshot, slot: SlotInfo, statistic: str, sample: int, type_: str | None
) -> pd.Series[float]:
    """Return a statistic by step, for one sample of a slot."""
    records = snapshot.records(type_)
    number = snapshot.sample(sample)
    if is_one_of(statistic, derived.NAMES):  # a parameter is its own sample 0
        values = _ratios(snapshot, slot, "mean")[records]
        values = values if number == 0 else np.full_like(values, np.nan)
    else:
        inner = number, snapshot.statistic(statistic)
        values = snapshot.view.series("smp", slot.id, *inner)[records]
    return pd.Series(values, index=snapshot.step_index(records), name=statistic)


def _ratios(snapshot: Snapshot, slot: SlotInfo, over_batch: str) -> NDArray[np.float32]:
    """Return the update ratio of a slot in all records; NaN if it has none."""
    aggregate(over_batch)
    derived.base(snapshot)
    column = snapshot.column("l2", "mean")
    pair = snapshot.update_pairs.get(slot.id)
    if pair is None:
        return np.full(len(snapshot.steps), np.nan, np.float32)
    update, parameter = (snapshot.view.series("agg", i, column) for i in pair)
    return derived.ratio(update, parameter, over_batch)


def row(snapshot: Snapshot, step: int, type_: str | None, over_batch: str) -> pd.DataFrame:
    """Return all statistics of the slots in a record, indexed by name."""
    found = arrays.row(snapshot, step, type_, over_batch)
    return pd.DataFrame(found.values, named_index(snapshot, found.ids), found.names)


def sample_row(snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None) -> pd.DataFrame:
    """Return all statistics of the samples in a record."""
    view, record = snapshot.view, snapshot.record(step, type_)
    if view.meta.sample_count and view.has_column(record, slot.id):
        table = view.row("smp", record, slot.id)
    else:
        table = np.full((0, len(view.meta.statistics)), np.nan, np.float32)
    found = arrays.present(snapshot, [*view.meta.statistics], table)
    frame = pd.DataFrame(found.values, pd.Index(found.ids, name="sample"), found.names)
    for name in derived.offered(snapshot):
        whole = arrays.row(snapshot, step, type_, "mean")
        own = whole.values[whole.ids == slot.id, whole.names.index(name)]
        frame[name] = np.full(len(frame), np.nan, np.float32)
        frame.loc[frame.index == 0, name] = own[0] if len(own) else np.nan
    places = [] if slot.batch_dim is None else view.samples(record)
    frame.attrs["batch_index"] = [places[i] for i in frame.index if i < len(places)]
    labels = [] if slot.batch_dim is None else view.extra(record).get("labels", [])
    frame.attrs["labels"] = [labels[i] for i in frame.index if i < len(labels)]
    return frame


def unusual(snapshot: Snapshot, step: int, statistic: str, type_: str | None) -> pd.DataFrame:
    """Return the distance of each sample from its batch: a row per slot, a column per sample."""
    found = distances(snapshot, step, statistic, type_)
    there = np.flatnonzero(~np.isnan(found).all(axis=1))
    columns = pd.RangeIndex(found.shape[1], name="sample")
    return pd.DataFrame(found[there], named_index(snapshot, there.tolist()), columns)


def heat(
    snapshot: Snapshot, statistic: str, pass_: str, over_batch: str, type_: str | None
) -> pd.DataFrame:
    """Return a statistic for all slots in a pass: one row per step, one column per slot."""
    found = arrays.heat(snapshot, statistic, pass_, over_batch, type_)
    index = pd.Index(found.steps, name="step")
    return pd.DataFrame(found.values, index, named_index(snapshot, found.ids))
