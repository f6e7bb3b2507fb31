"""One statistic of one tensor over training, prepared for drawing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.records import STATISTICS
from comgra_decl.viewer.model.runview import RunView, Slot, Steps
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.stretches import points_of

POINTS, WIDE = 600, 2000
"""Maximum number of points. Longer lines are thinned, keeping the extremes of each stretch.

The two numbers correspond to about two points per pixel of a small figure and of a page-wide
figure. With more points, drawing them took up most of the time needed to paint a line.
"""

_LONE = 0.003
"""Half the width of the band around a lone point, relative to the range of all steps."""

_NOISE = 1e-5
"""Difference of values, relative to their magnitude, below which it is rounding of float32."""

NEVER_NEGATIVE = (
    *("abs_mean", "std", "abs_max", "l2", "zero_fraction", "nonfinite", "rms", "snr"),
    *("negative_fraction", "kurtosis", "singular_value", "stable_rank", "effective_rank"),
    "update_ratio",
)

Floats = NDArray[np.float64]
Window = tuple[float, float]
"""First and last visible step."""


def _none() -> Floats:
    return np.empty(0)


@dataclass(frozen=True, slots=True)
class Curve:
    """A line over steps.

    `low` and `high` are the limits of the band of one standard deviation over the batch (empty if
    there is no band). `context` is the batch mean drawn behind the line of a single sample. NaN
    leaves a gap. `broken` contains the steps with a recorded NaN or infinity. `bounds` is the value
    range to show.
    """

    steps: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    values: Floats = field(default_factory=_none)
    low: Floats = field(default_factory=_none)
    high: Floats = field(default_factory=_none)
    context: Floats = field(default_factory=_none)
    broken: Steps = field(default_factory=lambda: np.empty(0, np.int64))
    bounds: tuple[float, float] = (0.0, 1.0)
    missing: str = ""

    def logarithmic(self) -> Curve:
        """Return the curve in powers of ten; non-positive values become gaps.

        A band that reaches below zero extends to the edge of the plot.
        """
        values, high, context = log10(self.values), log10(self.high), log10(self.context)
        if len(values) and np.isnan(values).all() and not self.missing:
            return replace(self, missing="There are no positive values. Choose a linear y axis.")
        shown = bounds(values, high, context)
        low = np.where((self.low <= 0) & ~np.isnan(high), shown[0], log10(self.low))
        return replace(self, values=values, low=low, high=high, context=context, bounds=shown)


def curve(
    view: RunView,
    slot: Slot | None,
    at: Selection,
    *,
    points: int = POINTS,
    within: Window | None = None,
) -> Curve:
    """Return the selected statistic of `slot` over all recorded steps, thinned by `drawn`."""
    if slot is None:
        return Curve(missing="Not recorded for this tensor.")
    batch = at.batch if slot.batch_dim is not None else "mean"
    key = ("curve", slot.id, at.type, at.statistic, batch, points, within)
    return view.now(key, lambda: _curve(view, slot, at, batch, (points, within)))


def _curve(
    view: RunView, slot: Slot, at: Selection, batch: str, shown_: tuple[int, Window | None]
) -> Curve:
    points, within = shown_
    if view.long and points <= WIDE and not batch.isdecimal():
        return _long_curve(view, slot, at, batch, shown_)
    main = _line(view, slot, at, batch)
    steps, values = np.asarray(main.index, np.int64), np.asarray(main, float)
    if not np.isfinite(values).any() and not len(_broken(view, slot, at, steps, values)):
        if at.statistic not in STATISTICS and len(values):
            return Curve(missing=f"{at.statistic} does not apply to this tensor.")
        return Curve(missing="No records of this tensor yet.")
    low, high, context = _surroundings(view, slot, at, batch, values)
    keep, shown = drawn(steps, values, points, within), bounds(values, low, high)
    low, high, context = (line[keep] if len(line) else line for line in (low, high, context))
    return Curve(
        steps[keep],
        values[keep],
        low,
        high,
        context,
        broken=_broken(view, slot, at, steps, values),
        bounds=shown,
    )


def _long_curve(
    view: RunView, slot: Slot, at: Selection, batch: str, shown_: tuple[int, Window | None]
) -> Curve:
    """Return the curve of a long run: extremes, and every record of a window that is close.

    Between extremes, the band contains the bands of all records of a span.
    """
    points, within = shown_
    odd = view.slot_extremes(slot, "nonfinite", batch, at.type)
    broken = odd["high_step"][odd["high"] > 0].to_numpy(np.int64)
    steps, values, spans = points_of(view.slot_extremes(slot, at.statistic, batch, at.type))
    if not np.isfinite(values).any() and not len(broken):
        known = at.statistic in STATISTICS or not len(values)
        what = "No records of this tensor yet." if known else ""
        return Curve(missing=what or f"{at.statistic} does not apply to this tensor.")
    banded = slot.batch_dim is not None and batch not in ("std", "abs_max")
    spread = np.full(len(values), np.nan)
    if banded:
        std = view.slot_extremes(slot, at.statistic, "std", at.type)
        spread = std["high"].to_numpy(float)[spans]
    shown = bounds(values, *_band(values, spread))
    if view.closely(within, at.type):
        assert within is not None
        close = view.window(at.statistic, [slot.id], within, batch, at.type)
        of_close = np.full(len(close.steps), np.nan)
        if banded:
            of_batch = view.window(at.statistic, [slot.id], within, "std", at.type)
            of_close = of_batch.values[:, 0].astype(float)
        apart = (steps < within[0]) | (steps > within[1])
        steps = np.concatenate([steps[apart], close.steps])
        values = np.concatenate([values[apart], close.values[:, 0].astype(float)])
        spread = np.concatenate([spread[apart], of_close])
        order = np.argsort(steps, kind="stable")
        steps, values, spread = steps[order], values[order], spread[order]
    keep = drawn(steps, values, points, within)
    steps, values, spread = steps[keep], values[keep], spread[keep]
    low, high = _band(values, spread) if banded else (_none(), _none())
    if at.statistic in NEVER_NEGATIVE:
        low = np.maximum(low, 0.0)
    return Curve(steps, values, low, high, broken=broken, bounds=shown)


def _band(values: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Return the limits of the band, which are NaN or infinite where the values are not finite."""
    with np.errstate(invalid="ignore"):
        return values - spread, values + spread


def extent(*lines: Steps) -> Window:
    """Return a range that contains all steps, with a small margin."""
    known = [line for line in lines if len(line)]
    if not known:
        return 0.0, 1.0
    low, high = min(float(line[0]) for line in known), max(float(line[-1]) for line in known)
    air = (high - low) * 0.015 or 0.5
    return low - air, high + air


def bounds(*lines: Floats) -> tuple[float, float]:
    """Return a range that contains all finite values, with a margin; never empty.

    Values that differ by no more than rounding are shown as equal.
    """
    finite = [line[np.isfinite(line)] for line in lines]
    known = np.concatenate([*finite, np.empty(0)])
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    air = 0.13 * max(-low, high) or 1.0 if flat(low, high) else (high - low) * 0.06
    return low - air, high + air


def flat(low: float, high: float) -> bool:
    """Return whether values in a range differ by no more than the rounding of float32."""
    return high - low <= _NOISE * max(-low, high)


def isolated(values: Floats) -> NDArray[np.int64]:
    """Return the indices of finite values between two gaps, which a line cannot show."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])


def band(line: Curve) -> tuple[Floats, Floats, Floats]:
    """Return x, low and high of the band, which has gaps where the line has gaps.

    A filled area cannot be interrupted, so it shrinks to zero height across a gap. A
    lone point has a narrow band around it. Empty without a band.
    """
    if not len(line.low):
        return _none(), _none(), _none()
    steps = line.steps.astype(float)
    known = np.isfinite(line.values) & np.isfinite(line.low) & np.isfinite(line.high)
    width = _LONE * (steps[-1] - steps[0])
    parts = []
    for start, end in _stretches(known):
        x, low, high = steps[start:end], line.low[start:end], line.high[start:end]
        if end - start == 1:
            x, low, high = x + width * np.array([-1, 1]), low.repeat(2), high.repeat(2)
        middle = (low[[0, -1]] + high[[0, -1]]) / 2
        thin_low, thin_high = (np.concatenate([middle[:1], y, middle[1:]]) for y in (low, high))
        parts.append((x[[0, *range(len(x)), -1]], thin_low, thin_high))
    if not parts:
        return _none(), _none(), _none()
    x, low, high = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return x, low, high


def _stretches(known: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return first and end index of every stretch of known values."""
    padded = np.concatenate([[False], known, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def drawn(
    steps: Steps, values: Floats, points: int, within: Window | None = None
) -> NDArray[np.int64]:
    """Return ascending indices of the points to draw.

    Args:
        steps: Steps of the values, ascending [k].
        values: Values of the line [k].
        points: Maximum number of points, overall and again within the window.
        within: Visible steps of a zoomed line.
    """
    keep = thin(values, points)
    if within is None or len(keep) == len(values):
        return keep
    first, last = np.searchsorted(steps, within)
    first = max(int(first) - 1, 0)  # one more point on each side, where the line leaves the window
    return np.union1d(keep, first + thin(values[first : last + 1], points))


def thin(values: Floats, points: int) -> NDArray[np.int64]:
    """Return up to about `points` ascending indices: extremes, and the first and last points."""
    size = len(values)
    if size <= points:
        return np.arange(size)
    edges = np.linspace(0, size, points // 2 + 1).astype(int)
    safe_low = np.where(np.isnan(values), np.inf, values)
    safe_high = np.where(np.isnan(values), -np.inf, values)
    stretches = list(pairwise(edges))
    lowest = [a + int(np.argmin(safe_low[a:b])) for a, b in stretches]
    highest = [a + int(np.argmax(safe_high[a:b])) for a, b in stretches]
    return np.unique([0, *lowest, *highest, size - 1])


def smoothed(values: Floats, weight: float) -> Floats:
    """Return the exponential moving average, with bias correction, as TensorBoard computes it.

    With the average a = w a + (1 - w) y, starting at 0, the k-th finite value y becomes a / (1 - w
    ** k). NaN and infinity remain unchanged and do not count. Equal values stay equal.

    Args:
        values: Values in order [k].
        weight: Weight w of earlier values, from 0 (no smoothing) to less than 1.
    """
    finite = np.isfinite(values)
    known = values[finite]
    if not weight or not len(known) or (len(known) == len(values) and (known == known[0]).all()):
        return values
    found = values.astype(float)
    found[finite] = pd.Series(known).ewm(alpha=1 - weight).mean()
    return found


def log10(values: Floats) -> Floats:
    """Return decimal logarithms; NaN for non-positive values."""
    logarithms: Floats = np.log10(values, out=np.full(len(values), np.nan), where=values > 0)
    return logarithms


def _line(view: RunView, slot: Slot, at: Selection, batch: str) -> pd.Series:
    if batch.isdecimal():
        return view.sample_series(slot, at.statistic, int(batch), at.type)
    return view.series(slot, at.statistic, batch, at.type)


def _surroundings(
    view: RunView, slot: Slot, at: Selection, batch: str, values: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the band around a batch mean, or the batch mean behind a single sample."""
    if slot.batch_dim is None or batch in ("std", "abs_max"):
        return _none(), _none(), _none()
    if batch.isdecimal():
        return _none(), _none(), np.asarray(view.series(slot, at.statistic, "mean", at.type))
    spread = np.asarray(view.series(slot, at.statistic, "std", at.type), float)
    low = values - spread
    if at.statistic in NEVER_NEGATIVE:
        low = np.maximum(low, 0.0)
    return low, values + spread, _none()


def _broken(view: RunView, slot: Slot, at: Selection, steps: Steps, values: Floats) -> Steps:
    """Return the steps whose value was recorded and is NaN or infinite."""
    if np.isfinite(values).all():
        return steps[:0]
    batch = at.batch if slot.batch_dim is not None else "mean"
    count = np.asarray(_line(view, slot, replace(at, statistic="nonfinite"), batch), float)
    applies = ~np.isnan(count) if at.statistic in STATISTICS else (count > 0) | np.isinf(values)
    broken: Steps = steps[~np.isfinite(values) & applies]
    return broken
