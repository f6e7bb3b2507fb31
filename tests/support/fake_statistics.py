"""Expected statistics of a tensor, computed with plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, STATISTICS, SlotInfo

Reduced = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Aggregates, samples, counts and range."""


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


def reduce(tensor: NDArray[Any], slot: SlotInfo, *, count: int, bins: int) -> Reduced:
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


def reduce_all(
    tensors: Sequence[NDArray[Any]], slots: Sequence[SlotInfo], *, count: int, bins: int
) -> list[Reduced]:
    """Return what `reduce` returns for each tensor, to the last bit and ten times as fast.

    Tensors of equal shape are reduced together; those whose histogram is a special case, alone.
    """
    alike: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for at, (tensor, slot) in enumerate(zip(tensors, slots, strict=True)):
        alike.setdefault((tensor.shape, slot.batch_dim), []).append(at)
    found: dict[int, Reduced] = {}
    for (shape, batch_dim), places in alike.items():
        stack = np.stack([tensors[at] for at in places])
        flat = stack.reshape(len(stack), -1)
        plain = np.isfinite(flat).all(1) & (flat.min(1) < flat.max(1))
        if batch_dim != 0 and batch_dim is not None:
            plain[:] = False
        whole = [at for at, is_plain in zip(places, plain, strict=True) if is_plain]
        if whole:
            rows = shape[0] if batch_dim == 0 else 1
            results = _reduced(stack[plain].reshape(len(whole), rows, -1), count, bins)
            found.update(zip(whole, results, strict=True))
    return [
        found[at] if at in found else reduce(tensor, slot, count=count, bins=bins)
        for at, (tensor, slot) in enumerate(zip(tensors, slots, strict=True))
    ]


def _reduced(stack: NDArray[Any], count: int, bins: int) -> list[Reduced]:
    """Reduce tensors [tensors, rows, elements] of finite numbers that are not all equal."""
    number, rows, elements = stack.shape
    each = statistics(stack.reshape(-1, elements)).reshape(number, rows, -1)
    aggregates = np.stack([each.mean(1), each.std(1), np.abs(each).max(1)], axis=2)
    samples = np.full((number, count, each.shape[2]), np.nan)
    picked = sample_indices(rows, count)
    samples[:, : len(picked)] = each[:, picked]
    flat = stack.reshape(number, -1)
    low, high = flat.min(1), flat.max(1)
    edges = np.linspace(low, high, bins + 1, axis=1, dtype=flat.dtype)
    places = ((flat - low[:, None]) / (high - low)[:, None] * bins).astype(np.intp)
    places[places == bins] -= 1
    places -= flat < np.take_along_axis(edges, places, 1)
    places += (flat >= np.take_along_axis(edges, places + 1, 1)) & (places != bins - 1)
    places += np.arange(number)[:, None] * bins
    counts = np.bincount(places.ravel(), minlength=number * bins).reshape(number, bins)
    extents = np.stack([low, high], axis=1)
    return [
        (
            aggregates[at].astype(np.float32),
            samples[at].astype(np.float32),
            counts[at].astype(np.uint32),
            extents[at].astype(np.float32),
        )
        for at in range(number)
    ]
