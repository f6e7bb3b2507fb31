"""Heat map of a tensor's value distribution over training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.columns import columns
from comgra_decl.viewer.model.runview import RunView, Slot, Steps
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import Window

ROWS, COLUMNS = 64, 320
"""Maximum numbers of rows and columns.

They are small because every cell must be sent and painted.
"""
QUARTILES = (0.25, 0.5, 0.75)
_TAIL = 0.01  # share of a record's values outside its range, per side
_ODD = 0.05  # share of records that may exceed the range, per side
_WHOLE = 4.0  # times the range of nearly all values; a wider range would squeeze them
_AIR = 0.03  # margin around all values

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Image [rows, columns] of value densities; each column is scaled to a maximum of 1.

    Contains the square root of the density, so that tails remain visible next to a peak. Covers
    steps `x0` to `x1` and values `y0` to `y1`. Row 0 contains the lowest values. NaN where there is
    no record. A column shows the newest record up to its position.

    `steps` [k] are the steps of the records in the columns, `quartiles` [3, k] their quartiles and
    median, and `lowest` and `highest` [k] their smallest and largest values, all NaN without a
    record.
    """

    image: Floats = field(default_factory=lambda: np.full((1, 1), np.nan))
    x0: float = 0.0
    x1: float = 1.0
    y0: float = 0.0
    y1: float = 1.0
    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    quartiles: Floats = field(default_factory=lambda: np.empty((3, 0)))
    lowest: Floats = field(default_factory=lambda: np.empty(0))
    highest: Floats = field(default_factory=lambda: np.empty(0))
    missing: str = ""

    @property
    def beyond(self) -> tuple[Steps, Steps]:
        """Steps of the records with values below the range shown, and above it."""
        return self.steps[self.lowest < self.y0], self.steps[self.highest > self.y1]


def distribution(
    view: RunView, slot: Slot | None, at: Selection, *, within: Window | None = None
) -> Distribution:
    """Return the histograms of `slot` over all recorded steps or a window."""
    if slot is None:
        return Distribution(missing="Not recorded for this tensor.")
    key = ("distribution", slot.id, at.type, within)
    return view.now(key, lambda: _distribution(view, slot, at, within))


def _distribution(view: RunView, slot: Slot, at: Selection, within: Window | None) -> Distribution:
    try:
        recorded, found, spans = view.histograms(slot, at.type)
    except ComgraError:
        return Distribution(missing="No histogram recorded. Set `histogram` in the spec.")
    known = np.isfinite(spans).all(axis=1) & (found.sum(axis=1) > 0)
    if not known.any():
        return Distribution(missing="No finite values recorded.")
    steps = view.steps(at.type)  # a step without a record of this tensor is a gap
    rows = np.searchsorted(steps, recorded[known])
    counts = np.zeros((len(steps), found.shape[1]), found.dtype)
    edges = np.full((len(steps), found.shape[1] + 1), np.nan)
    counts[rows], edges[rows] = found[known], spans[known]
    first = int(rows[0])
    return picture(steps[first:], counts[first:], edges[first:], within=within)


def picture(
    steps: Steps, counts: NDArray[np.uint32], edges: Floats, *, within: Window | None = None
) -> Distribution:
    """Return the image of histograms `counts` [k, bins] with `edges` [k, bins + 1]."""
    shares = cumulative(counts)
    y0, y1 = shown_range(shares, edges)
    x0, x1, chosen = columns(steps, within, most=COLUMNS)
    rows = np.linspace(y0, y1, ROWS + 1)
    image = np.full((ROWS, len(chosen)), np.nan)
    filled = ~np.isnan(shares[chosen, -1])
    records, place = np.unique(chosen[filled], return_inverse=True)
    image[:, filled] = _densities(rows, shares[records], edges[records])[place].T
    # no column begins at the last record, but a line ends there
    ones = np.unique(np.append(chosen, np.searchsorted(steps, x1, side="right") - 1))
    quartiles = np.array([quantile(shares[ones], edges[ones], q) for q in QUARTILES])
    ends = np.where(np.isnan(quartiles[1])[:, None], np.nan, edges[ones][:, [0, -1]])
    return Distribution(image, x0, x1, y0, y1, steps[ones], quartiles, ends[:, 0], ends[:, 1])


def shown_range(shares: Floats, edges: Floats) -> tuple[float, float]:
    """Return the range of all values, or of nearly all if a few are very far away.

    Args:
        shares: cumulative shares [k, bins].
        edges: edges of the bins of each record [k, bins + 1]; NaN without a record.
    """
    near = robust_range(shares, edges)
    ends = edges[~np.isnan(shares[:, -1])]
    low, high = float(ends.min()), float(ends.max())
    if high - low > _WHOLE * (near[1] - near[0]):
        return near
    air = _AIR * (max(high, near[1]) - min(low, near[0]))
    return min(low, near[0]) - air, max(high, near[1]) + air


def robust_range(shares: Floats, edges: Floats) -> tuple[float, float]:
    """Return a value range that contains nearly all values of nearly all records.

    `shares` [k, bins] are cumulative shares. Computes outer quantiles within each record, and then
    quantiles of these over all records. As a result, a single outlier or collapsed record does not
    determine the range.
    """
    known = ~np.isnan(shares[:, 0])
    lows, highs = (quantile(shares[known], edges[known], q) for q in (_TAIL, 1 - _TAIL))
    low, high = float(np.quantile(lows, _ODD)), float(np.quantile(highs, 1 - _ODD))
    if not high > low:
        air = abs(low) * 0.1 or 1.0
        return low - air, high + air
    return low, high


def cumulative(counts: NDArray[np.integer[Any]]) -> Floats:
    """Return the share of values up to the end of each bin, [k, bins]; NaN without values."""
    sums = np.cumsum(counts, axis=1, dtype=float)
    total = sums[:, -1:]
    shares: Floats = np.divide(sums, total, out=np.full_like(sums, np.nan), where=total > 0)
    return shares


def quantile(shares: Floats, edges: Floats, q: float) -> Floats:
    """Return each record's `q` quantile, [k], interpolated linearly within a bin; NaN if none."""
    at = np.pad(shares, ((0, 0), (1, 0)))
    bin_ = np.minimum((at <= q).sum(axis=1), shares.shape[1]) - 1
    below, above = (np.take_along_axis(at, (bin_ + i)[:, None], axis=1)[:, 0] for i in (0, 1))
    inside = np.divide(q - below, above - below, out=np.zeros(len(at)), where=above > below)
    start, end = (np.take_along_axis(edges, (bin_ + i)[:, None], axis=1)[:, 0] for i in (0, 1))
    values: Floats = start + inside * (end - start)
    return np.where(np.isnan(shares[:, -1]), np.nan, values)


def _densities(rows: Floats, shares: Floats, edges: Floats) -> Floats:
    """Return the square root of each record's share between consecutive `rows`, [k, rows].

    Each record is scaled to a maximum of 1.
    """
    half = (rows[1] - rows[0]) / 2
    at = np.pad(shares, ((0, 0), (1, 0)))
    below = np.empty((len(edges), len(rows)))
    for record, (mine, its) in enumerate(zip(edges, at, strict=True)):
        if mine[-1] > mine[0]:
            below[record] = np.interp(rows, mine, its)
        else:  # all values are equal
            near = np.linspace(mine[0] - half, mine[0] + half, len(its))
            below[record] = np.interp(rows, near, its)
    part = np.diff(below, axis=1)
    largest = part.max(axis=1, keepdims=True, initial=0)
    density: Floats = np.sqrt(np.divide(part, largest, out=np.zeros_like(part), where=largest > 0))
    return density
