"""The recorded samples as rows of one table, as libraries for tables of features expect them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.sinks.naming import SeriesName

from .chunks import chunks
from .snapshot import Snapshot
from .statistics import chosen_slots


def sample_table(
    snapshot: Snapshot,
    names: Sequence[str],
    *,
    nodes: str | Sequence[str],
    of: str | None,
    type_: str | None,
) -> pd.DataFrame:
    """Return one row per record and recorded sample; see `Run.samples_frame`."""
    view = snapshot.view
    wanted = [*dict.fromkeys(names)] or view.meta.statistics
    columns = [snapshot.statistic(name) for name in wanted]
    slots = [
        slot
        for slot in chosen_slots(snapshot, nodes=nodes, of=of)
        if slot.batch_dim is not None and slot.kind not in ("target", "loss")
    ]
    records = snapshot.records(type_)
    places = [view.samples(int(record)) for record in records]
    numbers = [len(each) for each in places]
    rows = np.repeat(records, numbers)
    samples = np.concatenate([np.arange(n) for n in numbers] or [np.arange(0)])
    found = _features(snapshot, [slot.id for slot in slots], columns, rows, samples)
    steps = snapshot.steps[rows]
    index = pd.MultiIndex.from_arrays([steps, samples], names=["step", "sample"])
    titles = [str(SeriesName(slot.key, name)) for slot in slots for name in wanted]
    table = pd.DataFrame(found, index, titles)
    labels = [
        label
        for record, n in zip(records, numbers, strict=True)
        for label in (view.extra(int(record)).get("labels") or [None] * n)[:n]
    ]
    table.insert(0, "label", pd.Series(labels, index, object))
    table.insert(0, "place", np.array([p for each in places for p in each], np.int64))
    return table


def _features(
    snapshot: Snapshot,
    slots: Sequence[int],
    columns: Sequence[int],
    records: NDArray[np.int64],
    samples: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Return statistics of samples, [n, slots * columns]; `records` and `samples` are [n]."""
    number = len(slots) * len(columns)
    found = np.full((len(records), len(slots), len(columns)), np.nan, np.float32)
    if not found.size:
        return found.reshape(len(records), number)
    for chunk in chunks(snapshot):
        here = np.flatnonzero(np.isin(records, chunk.records))
        rows = np.searchsorted(chunk.records, records[here])
        for i, slot in enumerate(slots):
            numbers = chunk.samples(slot) if len(here) else None
            if numbers is not None:
                found[here, i] = numbers[rows, samples[here]][:, columns]
    return found.reshape(len(records), number)
