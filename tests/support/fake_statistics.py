"""Expected statistics of a tensor, computed with plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, STATISTICS, SlotInfo


def sample_indices(batch: int, count: int) -> list[int]:
    """Return evenly spaced batch indices."""
    return [index * batch // count for index in range(min(batch, count))]


def statistics(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return all STATISTICS [rows, 9] over the elements of each row [rows, elements].

    NaN and infinities are counted, and excluded from all other statistics.
    """
    rows = np.asarray(rows, np.float64)
    finite = np.isfinite(rows)
    values = np.where(finite, rows, 0.0)
    number, size = finite.sum(1), np.abs(values)
    mean = values.sum(1) / number
    return np.stack(
        [
            mean,
            size.sum(1) / number,
            np.sqrt((np.where(finite, rows - mean[:, None], 0.0) ** 2).sum(1) / number),
            np.where(finite, rows, np.inf).min(1),
            np.where(finite, rows, -np.inf).max(1),
            size.max(1),
            np.sqrt((values**2).sum(1)),
            ((values == 0) & finite).sum(1) / number,
            rows.shape[1] - number,
        ],
        axis=1,
    )


def reduce(
    tensor: NDArray[Any], slot: SlotInfo, *, count: int, bins: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return aggregates, samples, counts and range of one tensor."""
    rows = np.moveaxis(tensor, slot.batch_dim, 0) if slot.batch_dim is not None else tensor[None]
    each = statistics(rows.reshape(len(rows), -1))
    aggregates = np.stack([each.mean(0), each.std(0), np.abs(each).max(0)], axis=1)
    assert aggregates.shape == (len(STATISTICS), len(AGGREGATES))
    samples = np.full((count, len(STATISTICS)), np.nan)
    picked = sample_indices(len(rows), count)  # a tensor without a batch is its own sample 0
    samples[: len(picked)] = each[picked]
    finite = tensor[np.isfinite(tensor)]
    counts, edges = np.histogram(finite, bins=bins)
    extent = np.array([edges[0], edges[-1]])
    return (
        aggregates.astype(np.float32),
        samples.astype(np.float32),
        counts.astype(np.uint32),
        extent.astype(np.float32),
    )
