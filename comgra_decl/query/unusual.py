"""How unusual each recorded sample is at each tensor, compared with the rest of its batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .snapshot import Snapshot

Floats = NDArray[np.float64]


def distances(snapshot: Snapshot, step: int, statistic: str, type_: str | None) -> Floats:
    """Return the distance of each sample from the others, [slots, samples].

    See `Run.unusual`. NaN for a tensor without a batch dimension, for a sample that was not
    recorded, and where the others do not vary.
    """
    view, record = snapshot.view, snapshot.record(step, type_)
    place = snapshot.statistic(statistic)
    whole = view.row("agg", record)[: len(view.slots)].astype(float)
    if not view.meta.sample_count:
        return np.full((len(whole), 0), np.nan)
    single = view.row("smp", record)[: len(view.slots), :, place].astype(float)
    mean, spread = (whole[:, snapshot.column(statistic, name)] for name in ("mean", "std"))
    return away(single, mean, spread, _counts(snapshot, whole))


def _counts(snapshot: Snapshot, whole: Floats) -> Floats:
    """Return the number of samples in the batch of each slot, [slots].

    If a record does not state it, the number in the first record is used.
    """
    view = snapshot.view
    slots = view.slots[: len(whole)]  # a record may be older than the last slots
    first = [np.nan if s.batch_dim is None else s.shape[s.batch_dim] for s in slots]
    counts = np.array(first, float)
    if "rows" in view.meta.columns:
        told = whole[:, view.meta.columns.index("rows")]
        counts = np.where(np.isnan(told), counts, told)
    return counts


def away(single: Floats, mean: Floats, spread: Floats, counts: Floats) -> Floats:
    """Return (x - mean of the others) / standard deviation of the others, [slots, samples].

    The sums over the others follow from those over all n samples: their mean is
    (n m - x) / (n - 1), and the mean of their squares is (n (s^2 + m^2) - x^2) / (n - 1).

    Args:
        single: x, a statistic of each sample, [slots, samples].
        mean: m, its mean over the batch, [slots].
        spread: s, its standard deviation over the batch (population), [slots].
        counts: n, the number of samples in the batch, [slots].
    """
    n, m, s = (values[:, None] for values in (counts, mean, spread))
    x = single - m  # about the mean, for precision
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = -x / (n - 1)
        variance = (n * s**2 - x**2) / (n - 1) - middle**2
        tiny = variance <= 1e-9 * s**2  # the others agree, up to rounding
        found = np.where(tiny, np.sign(x) * np.inf, (x - middle) / np.sqrt(variance))
        found[(n < 3) | (s == 0) | (x == 0) & tiny] = np.nan
    result: Floats = np.where(np.isnan(single), np.nan, found)
    return result
