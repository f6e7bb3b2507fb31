"""Where the bins of a histogram lie.

Only the two ends of a histogram are stored; its edges follow from them and from the spacing that
the whole run uses.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Spacing = Literal["signed_log", "linear"]
"""Bins of equal width, or bins that are finer near zero: of equal width after `asinh(1000 x / m)`,
where m is the largest magnitude in the histogram. Values above a thousandth of it are spaced
logarithmically, smaller ones linearly."""

SPACINGS: tuple[Spacing, ...] = get_args(Spacing)

STEEPNESS = 1000.0  # gradients and activations commonly span three orders of magnitude
_NARROW = 4.0  # ratio of the ends, up to which a logarithm would gain nothing and lose digits
_TINY, _HUGE = 1e-30, 1e37  # magnitudes in between can be divided in float32

Floats = NDArray[np.float64]


def bends(low: ArrayLike, high: ArrayLike, spacing: Spacing) -> NDArray[np.bool_]:
    """Return where the bins between two ends are not of equal width.

    They are of equal width if the spacing is linear, if both ends are whole numbers (classes and
    masks are), or if the values are far from zero relative to their range.

    Args:
        low: lowest values [...]; NaN where there are none.
        high: highest values.
        spacing: the spacing of the run.
    """
    one, two = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if spacing == "linear":
        return np.zeros(np.broadcast(one, two).shape, np.bool_)
    with np.errstate(all="ignore"):
        largest, least = np.maximum(np.abs(one), np.abs(two)), np.minimum(np.abs(one), np.abs(two))
        far = (one * two > 0) & (largest < _NARROW * least)
        whole = (one == np.rint(one)) & (two == np.rint(two))
        usual = (two > one) & (largest > _TINY) & (largest < _HUGE)
    return np.asarray(usual & ~far & ~whole)


def edges_of(low: ArrayLike, high: ArrayLike, bins: int, spacing: Spacing) -> Floats:
    """Return the edges of histograms, float64 [..., bins + 1]; the outer ones are exactly the ends.

    Args:
        low: lowest edges [...]; NaN where there are none.
        high: highest edges.
        bins: number of bins.
        spacing: the spacing of the run.
    """
    one, two = (np.asarray(end, np.float64)[..., None] for end in (low, high))
    place = np.arange(bins + 1) / bins
    with np.errstate(all="ignore"):
        found = one + place * (two - one)
        curved = bends(one, two, spacing)
        if curved.any():
            unit = np.maximum(np.abs(one), np.abs(two)) / STEEPNESS
            first, last = np.arcsinh(one / unit), np.arcsinh(two / unit)
            found = np.where(curved, unit * np.sinh(first + place * (last - first)), found)
    found[..., :1], found[..., -1:] = one, two
    return np.asarray(found)


def fractions_of(values: ArrayLike, low: ArrayLike, high: ArrayLike, spacing: Spacing) -> Floats:
    """Return where values are among bins: 0 at the lowest edge, 1 at the highest.

    This is the inverse of `edges_of`.

    Args:
        values: [...]; may be outside.
        low: lowest edges, broadcast against the values.
        high: highest edges.
        spacing: the spacing of the run.
    """
    given, one, two = (np.asarray(each, np.float64) for each in (values, low, high))
    with np.errstate(all="ignore"):
        found = (given - one) / (two - one)
        curved = bends(one, two, spacing)
        if curved.any():
            unit = np.maximum(np.abs(one), np.abs(two)) / STEEPNESS
            first, last = np.arcsinh(one / unit), np.arcsinh(two / unit)
            found = np.where(curved, (np.arcsinh(given / unit) - first) / (last - first), found)
    return np.asarray(found)
