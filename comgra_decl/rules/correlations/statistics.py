"""Makes series comparable and computes chance levels, for all columns together."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

WINDOW = 31
"""Number of records that define the usual magnitude of a series."""

_CLIP = 3.0
_EVEN = 0.02  # squared curvature divided by squared change: adjacent changes correlate by 99%
_MEMORY = 20  # records over which autocorrelation is considered


def smoothed(columns: Floats, window: int = WINDOW) -> Floats:
    """Return the centred moving mean of each column [n, m], ignoring non-finite values."""
    half = min(window, len(columns)) // 2
    known = np.isfinite(columns)
    sums = _cumulated(np.where(known, columns, 0))
    counts = _cumulated(known.astype(np.float32))
    at = np.arange(len(columns))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(columns))
    found: Floats = (
        (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    ).astype(np.float32)  # fmt: skip
    return found


def _cumulated(columns: NDArray[np.floating]) -> Doubles:
    sums = np.zeros((len(columns) + 1, columns.shape[1]))
    np.cumsum(columns, axis=0, out=sums[1:])
    return sums


def levelled(columns: Floats) -> Floats:
    """Return the columns, with those that are always positive as logarithms."""
    with np.errstate(all="ignore"):
        positive = ~(columns <= 0).any(axis=0)
        levels = np.where(positive, np.log(np.where(columns > 0, columns, 1)), columns)
    levels[~np.isfinite(columns)] = np.nan
    result: Floats = levels.astype(np.float32)
    return result


def changes(columns: Floats) -> Floats:
    """Return the changes between records, in units of the usual change there, of shape [n - 1, m].

    Trends cancel out, because only their mean remains in a difference, and the usual change is that
    of nearby records. Changes are clipped to 3 units. Each column has mean 0 and length 1. It is 0
    where values are missing, which can only reduce correlations.
    """
    found = np.diff(levelled(columns), axis=0)
    smooth = _is_smooth(found)
    for _ in range(2):  # the second pass removes the remaining curvature
        found -= smoothed(found)
    scale = smoothed(np.abs(found))
    scale[:, smooth] = np.nan
    with np.errstate(all="ignore"):
        found = np.clip(found / scale, -_CLIP, _CLIP)
    found[~np.isfinite(found)] = 0
    return normalized(found)


def detrended(columns: Floats) -> Floats:
    """Return the distance of each value from nearby ones, in units of the usual distance there."""
    found = levelled(columns)
    for _ in range(2):  # as in `changes`
        found -= smoothed(found)
    with np.errstate(all="ignore"):
        scaled: Floats = found / smoothed(np.abs(found))
    return scaled


def ranked(columns: Floats) -> Floats:
    """Return the rank of each value in its column, from -1 to 1; 0 where values are missing.

    Equal values share a rank. The middle rank is shifted slightly, so that 0 always means missing.
    """
    found = np.zeros_like(columns)
    for column in range(columns.shape[1]):
        there = np.flatnonzero(np.isfinite(columns[:, column]))
        _, which, many = np.unique(columns[there, column], return_inverse=True, return_counts=True)
        middle = np.cumsum(many) - many / 2
        ranks = 2 * middle[which] / max(1, len(there)) - 1
        found[there, column] = np.where(ranks == 0, 1e-6, ranks)
    return found


def _is_smooth(found: Floats) -> NDArray[np.bool_]:
    """Return which columns change so evenly that they contain only a trend."""
    bends = np.diff(found, axis=0)
    return np.asarray(np.nanmean(bends**2, axis=0) < _EVEN * np.nanmean(found**2, axis=0))


def normalized(columns: Floats) -> Floats:
    """Return columns of length 1; non-zero elements have mean 0, constant columns become 0."""
    there = columns != 0
    columns = columns - columns.sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    columns = np.where(there, columns, 0)
    length = np.sqrt((columns**2).sum(axis=0))
    scaled: Floats = (columns / np.where(length > 0, length, 1)).astype(np.float32)
    return scaled


def memory(columns: Floats) -> Floats:
    """Return the autocorrelation of each column at lags of 1 .. 20 records, [20, m]."""
    lags = range(1, min(_MEMORY, len(columns) - 1) + 1)
    return np.stack([(columns[lag:] * columns[:-lag]).sum(axis=0) for lag in lags])


def independent(count: Doubles, ours: Floats, theirs: Floats) -> Doubles:
    """Return the number of independent records among `count`, [m, k] (Bartlett's formula).

    Args:
        count: the number of records with values of both, [m, k].
        ours: the result of `memory`, [20, m].
        theirs: the result of `memory`, [20, k].
    """
    excess: Doubles = 1 + 2 * (ours.T.astype(np.float64) @ theirs.astype(np.float64))
    return np.minimum(count, count / np.maximum(excess, 0.5))


def chance(correlation: Doubles, count: Doubles) -> Doubles:
    """Return the probability of a correlation at least as large by chance (Fisher)."""
    free = np.maximum(count - 3, 0.0)
    with np.errstate(divide="ignore"):
        score = np.arctanh(np.clip(np.abs(correlation), 0, 1 - 1e-7)) * np.sqrt(free)
    tail = np.frompyfunc(lambda z: math.erfc(z / math.sqrt(2)), 1, 1)
    found: Doubles = tail(score).astype(np.float64)
    return found


def interval(correlation: float, count: float) -> tuple[float, float]:
    """Return the 95% interval of a correlation over `count` independent records (Fisher)."""
    centre = math.atanh(max(-0.9999999, min(0.9999999, correlation)))
    half = 1.96 / math.sqrt(max(count - 3, 0.25))
    return math.tanh(centre - half), math.tanh(centre + half)


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson)."""
    z = 1.96
    share, denominator = hits / count, 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def false_shares(chances: Doubles, tried: int) -> Doubles:
    """Return the false discovery rate if all results up to each probability are accepted.

    Benjamini and Hochberg (1995). `chances` may be a subset of the `tried` comparisons.
    """
    order = np.argsort(chances)
    rank = np.arange(1, len(chances) + 1)
    raised = chances[order] * tried / rank
    found = np.empty(len(chances))
    found[order] = np.minimum.accumulate(raised[::-1])[::-1]
    return np.minimum(found, 1.0)
