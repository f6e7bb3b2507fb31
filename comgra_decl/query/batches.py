"""What the batches of a tensor contain: ranges, channels, duplicates and classes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MOST_CLASSES = 1000
_MOST_LEVELS = 64  # different values of images that are still listed, such as those of a mask
_MOST_CHANNELS = 16
_COLOURS = (1, 3, 4)  # numbers of channels of an image


@dataclass(frozen=True)
class Summary:
    """What one tensor contains, over all batches.

    Attributes:
        label: its label.
        shapes: its different shapes.
        dtype: its dtype.
        low: the smallest finite value; None if there is none.
        high: the largest finite value.
        mean: the mean of the finite values.
        std: their standard deviation (with N, not N - 1).
        nonfinite: number of NaN and infinite values.
        channels: mean and standard deviation of each channel, if there are at most 16. Columns of
            integers [samples, columns] are no channels, because they may be tokens.
        repeated: number of samples that equal an earlier sample in their batch.
        shared: number of samples that equal a sample of an earlier batch.
        samples: number of samples.
        classes: for integers with at most 1000 different values: how often each of them occurs.
            For images, which have channels, with at most 64.
        fewest: the smallest number of different values in any batch, if there are `classes`.
    """

    label: str
    shapes: list[list[int]]
    dtype: str
    low: float | None
    high: float | None
    mean: float | None
    std: float | None
    nonfinite: int
    channels: list[tuple[float, float]]
    repeated: int
    shared: int
    samples: int
    classes: dict[int, int]
    fewest: int | None


def summary(label: str, batches: list[Array], *, convolved: bool = False) -> Summary:
    """Return what a tensor contains, over all batches, each of shape [samples, ...].

    Args:
        label: its label.
        batches: its values.
        convolved: whether the model passed it to a convolution.
    """
    flat = np.concatenate([batch.reshape(-1) for batch in batches]) if batches else np.empty(0)
    numbers = flat.astype(np.float64) if flat.dtype.kind in "fiub" else np.empty(0)
    finite = numbers[np.isfinite(numbers)]
    some = finite.size > 0
    repeated, shared, samples = _duplicates(batches)
    channels = _channels(batches, convolved=convolved)
    are_images = bool(channels) and batches[0].ndim == 4
    classes = _classes(flat, _MOST_LEVELS if are_images else _MOST_CLASSES)
    return Summary(
        label=label,
        shapes=[[*shape] for shape in dict.fromkeys(batch.shape for batch in batches)],
        dtype=str(flat.dtype),
        low=float(finite.min()) if some else None,
        high=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
        std=float(finite.std()) if some else None,
        nonfinite=int(numbers.size - finite.size),
        channels=channels,
        repeated=repeated,
        shared=shared,
        samples=samples,
        classes=classes,
        fewest=min(len(np.unique(batch)) for batch in batches) if classes else None,
    )


def _duplicates(batches: list[Array]) -> tuple[int, int, int]:
    """Return how many samples repeat one of their batch, or of an earlier batch, and their number.

    Samples with a single value, such as classes, are not compared.
    """
    repeated = shared = samples = 0
    earlier: set[bytes] = set()
    for batch in batches:
        if batch.ndim == 0:
            continue
        samples += len(batch)
        if batch[:1].size <= 1:
            continue
        here: set[bytes] = set()
        for sample in np.ascontiguousarray(batch):
            digest = hashlib.sha256(sample.tobytes()).digest()
            repeated += digest in here
            shared += digest not in here and digest in earlier
            here.add(digest)
        earlier |= here
    return repeated, shared, samples


def _classes(values: Array, most: int) -> dict[int, int]:
    if values.dtype.kind not in "iub" or not values.size:
        return {}
    names, counts = np.unique(values, return_counts=True)
    pairs = zip(names.tolist(), counts.tolist(), strict=True)
    return {int(name): int(count) for name, count in pairs} if len(names) <= most else {}


def channel_axis(shape: tuple[int, ...], *, convolved: bool) -> int | None:
    """Return the axis of the channels of images [samples, ...] or features [samples, features].

    Images have their channels last if that is a number of colours and smaller than height and
    width, and if the second axis cannot be one.

    Args:
        shape: the shape of a batch.
        convolved: whether the model passed it to a convolution, so that the channels are second.
    """
    if len(shape) == 4 and not convolved:
        _, second, third, last = shape
        if second not in _COLOURS and last in _COLOURS and last < min(second, third):
            return 3
    return 1 if len(shape) in (2, 4) and shape[1] <= _MOST_CHANNELS else None


def _channels(batches: list[Array], *, convolved: bool) -> list[tuple[float, float]]:
    axes = {(channel_axis(batch.shape, convolved=convolved), batch.ndim) for batch in batches}
    axis, ndim = next(iter(axes), (None, 0))
    kinds = "fiu" if ndim == 4 else "f"  # integers in two dimensions may be tokens
    if len(axes) != 1 or axis is None or batches[0].dtype.kind not in kinds:
        return []
    if len({batch.shape[axis] for batch in batches}) > 1:
        return []
    rows = [np.moveaxis(batch, axis, 0).reshape(batch.shape[axis], -1) for batch in batches]
    whole = np.concatenate(rows, axis=1).astype(np.float64)
    finite = [row[np.isfinite(row)] for row in whole]
    return [(float(row.mean()), float(row.std())) for row in finite if row.size]
