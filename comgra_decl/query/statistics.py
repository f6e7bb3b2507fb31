"""Statistics of slots: over steps, over slots, over samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, is_one_of, shown
from comgra_decl.records import AGGREGATES, SlotInfo

from . import derived
from .snapshot import Snapshot, aggregate, named


def series(
    snapshot: Snapshot, slot: SlotInfo, statistic: str, over_batch: str, type_: str | None
) -> pd.Series[float]:
    """Returns one statistic by step."""
    records = snapshot.records(type_)
    if is_one_of(statistic, derived.NAMES):
        values = _ratios(snapshot, slot, over_batch)[records]
    else:
        column = snapshot.column(statistic, over_batch)
        values = snapshot.view.series("agg", slot.id, column)[records]
    return pd.Series(values, index=snapshot.step_index(records), name=statistic)


def shape_series(snapshot: Snapshot, slot: SlotInfo, type_: str | None) -> pd.Series[Any]:
    """Returns the shape of a slot by step, of the records that have it."""
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
    """Returns the shapes of the slots present in a record."""
    view, names = snapshot.view, snapshot.view.meta.columns
    table = view.row("agg", snapshot.record(step, type_))[: len(view.slots)]
    there = np.flatnonzero(~np.isnan(table[:, names.index("nonfinite.mean")]))
    codes = np.zeros(len(there))
    if view.meta.tells_shapes:
        codes = table[there, names.index("shape")]
    pairs = zip(there.tolist(), codes.tolist(), strict=True)
    found = [view.shape(slot, code) for slot, code in pairs]
    return _shapes(found, pd.Index(there, name="slot"))


def _shapes(found: list[tuple[int, ...] | None], index: pd.Index[int]) -> pd.Series[Any]:
    cells = np.empty(len(found), object)
    cells[:] = found  # pandas would make columns of a list of tuples
    return pd.Series(cells, index=index, name="shape")


def shape(
    snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None
) -> tuple[int, ...] | None:
    """Returns the shape of a slot at a step.

    Raises:
        UnknownNameError: the slot was not recorded at this step.
    """
    known = shapes(snapshot, step, type_)
    if slot.id not in known.index:
        raise UnknownNameError(f"{named(slot)} was not recorded at step {step}.")
    found: tuple[int, ...] | None = known[slot.id]
    return found


def sample_series(
    snapshot: Snapshot, slot: SlotInfo, statistic: str, sample: int, type_: str | None
) -> pd.Series[float]:
    """Returns one statistic of one sample by step."""
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
    """Returns the update ratio of a slot in all records, NaN where it has none."""
    aggregate(over_batch)
    derived.base(snapshot)
    column = snapshot.column("l2", "mean")
    pair = snapshot.update_pairs.get(slot.id)
    if pair is None:
        return np.full(len(snapshot.steps), np.nan, np.float32)
    update, parameter = (snapshot.view.series("agg", i, column) for i in pair)
    return derived.ratio(update, parameter, over_batch)


def row(snapshot: Snapshot, step: int, type_: str | None, over_batch: str) -> pd.DataFrame:
    """Returns all statistics of the slots present in a record."""
    rank = aggregate(over_batch)
    table = snapshot.view.row("agg", snapshot.record(step, type_))
    names = snapshot.view.meta.statistics
    values = table[: len(snapshot.view.slots), : len(names) * len(AGGREGATES)]
    frame = _present(snapshot, values[:, rank :: len(AGGREGATES)], "slot")
    for name in derived.offered(snapshot):
        lengths = values[:, derived.base(snapshot) * len(AGGREGATES)]
        ratios = np.full(len(lengths), np.nan, np.float32)
        _fill_ratios(snapshot, ratios, lengths, over_batch)
        frame[name] = ratios[frame.index]
    return frame


def _fill_ratios(
    snapshot: Snapshot, out: NDArray[np.float32], lengths: NDArray[np.float32], over_batch: str
) -> None:
    """Fills in the update ratios [..., slots] of all slots that have one, from their l2."""
    there = {
        slot: pair for slot, pair in snapshot.update_pairs.items() if max(pair) < lengths.shape[-1]
    }
    if there:
        update, parameter = np.array(list(there.values())).T
        out[..., list(there)] = derived.ratio(
            lengths[..., update], lengths[..., parameter], over_batch
        )


def sample_row(snapshot: Snapshot, slot: SlotInfo, step: int, type_: str | None) -> pd.DataFrame:
    """Returns all statistics of the samples present in a record."""
    view, record = snapshot.view, snapshot.record(step, type_)
    if view.meta.sample_count and view.has_column(record, slot.id):
        table = view.row("smp", record, slot.id)
    else:
        table = np.full((0, len(view.meta.statistics)), np.nan, np.float32)
    frame = _present(snapshot, table, "sample")
    for name in derived.offered(snapshot):
        whole = row(snapshot, step, type_, "mean")[name].get(slot.id, np.nan)
        frame[name] = np.where(frame.index == 0, whole, np.nan).astype(np.float32)
    places = [] if slot.batch_dim is None else view.samples(record)
    frame.attrs["batch_index"] = [places[i] for i in frame.index if i < len(places)]
    labels = [] if slot.batch_dim is None else view.extra(record).get("labels", [])
    frame.attrs["labels"] = [labels[i] for i in frame.index if i < len(labels)]
    return frame


def heat(
    snapshot: Snapshot, statistic: str, pass_: str, over_batch: str, type_: str | None
) -> pd.DataFrame:
    """Returns one statistic of all slots of a pass at all steps."""
    records = snapshot.records(type_)
    if not is_one_of(pass_, [pass_]):
        raise UnknownNameError(
            f"{shown(pass_)} is no pass; write 'forward' or 'grad', for example."
        )
    ids = [slot.id for slot in snapshot.view.slots if slot.key.pass_ == pass_]
    slots = np.array(ids, np.int64)
    if is_one_of(statistic, derived.NAMES):
        derived.base(snapshot)
        lengths = snapshot.view.heat("agg", snapshot.column("l2", "mean"))
        values = np.full_like(lengths, np.nan)
        _fill_ratios(snapshot, values, lengths, over_batch)
    else:
        values = snapshot.view.heat("agg", snapshot.column(statistic, over_batch))
    index, columns = pd.Index(slots, name="slot"), snapshot.step_index(records)
    return pd.DataFrame(values[records][:, slots].T, index=index, columns=columns)


def _present(snapshot: Snapshot, values: NDArray[np.float32], name: str) -> pd.DataFrame:
    """Keeps the lines that were recorded: there `nonfinite` is a number, whatever the rest is."""
    names = snapshot.view.meta.statistics
    there = np.flatnonzero(~np.isnan(values[:, names.index("nonfinite")]))
    index = pd.Index(there, name=name)
    return pd.DataFrame(values[there], index=index, columns=list(names))
