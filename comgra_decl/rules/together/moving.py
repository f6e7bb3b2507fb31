"""Series that rise and fall together, one perhaps before the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.together import numbers as n
from comgra_decl.rules.together.correlation import Correlation, Side
from comgra_decl.rules.together.series import Series

LEAST_RECORDS = 40
"""With fewer, chance makes anything look alike."""

LEAST_STRENGTH = 0.3
"""Weaker correlations explain less than a tenth of what moves, and are left out."""

SAME = 0.995
"""Two series that are so much alike at the same record are one thing under two names."""

_LAGS = 50
_EVEN = 2.0  # gaps between records differ by less, else a lag in records means nothing


def lags_of(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the lags to try, in records; none but 0 where records come at uneven distances."""
    gaps = np.diff(steps)
    low, high = np.quantile(gaps, [0.1, 0.9]) if len(gaps) else (1, 1)
    most = min(_LAGS, len(steps) // 8) if high <= _EVEN * low else 0
    return np.arange(-most, most + 1)


def moving(series: Series) -> list[tuple[Correlation, n.Floats]]:
    """Returns what moves with each number of the program, with the moves of the candidate."""
    if len(series.steps) < LEAST_RECORDS or not series.numbers:
        return []
    names = list(series.numbers)
    targets = n.changes(np.stack([series.numbers[name] for name in names], axis=1))
    marks = [side for side in series.marks if side.text.startswith(("type ", "tag "))]
    labels = [series.marks[side].astype(np.float32)[:, None] for side in marks]
    sides = [*series.sides, *(Side(name) for name in names), *marks]
    others = [n.normalised(np.diff(label, axis=0)) for label in labels]
    candidates = np.concatenate([n.changes(series.values), targets, *others], axis=1)
    return _clear(series, sides, names, candidates=candidates, targets=targets)


def _clear(
    series: Series, sides: list[Side], names: list[str], *, candidates: n.Floats, targets: n.Floats
) -> list[tuple[Correlation, n.Floats]]:
    lags = lags_of(series.steps)
    best, at, same = _best_lags(candidates, targets, lags)
    own = (candidates != 0).sum(axis=0)[:, None]
    counts = np.minimum(own, (targets != 0).sum(axis=0)[None]) - np.abs(lags[at])
    free = n.independent(counts.astype(float), n.memory(candidates), n.memory(targets))
    chances = np.minimum(1.0, n.chance(best, free) * len(lags))
    first_target = len(series.sides)
    rows = np.arange(len(sides))[:, None] - first_target  # a number with itself or an earlier one
    skip = ((rows >= 0) & (rows <= np.arange(len(names))[None])) | (np.abs(same) > SAME)
    chances[skip] = 1.0
    shares = n.false_shares(chances.ravel(), int((~skip).sum())).reshape(chances.shape)
    found = []
    for i, k in zip(*np.nonzero(shares < 0.05), strict=True):
        effect, count = float(best[i, k]), float(free[i, k])
        low, high = n.interval(effect, count)
        lag = int(lags[at[i, k]])
        correlation = Correlation(
            kind="moves", first=sides[i], second=Side(names[k]), effect=effect, low=low, high=high,
            records=len(series.steps), count=int(count), q=float(shares[i, k]),
            lag_records=lag, lag_steps=_in_steps(series.steps, lag),
            first_step=_clearest(series.steps, candidates[:, i], targets[:, k], lag),
        )  # fmt: skip
        if correlation.strength >= LEAST_STRENGTH:
            found.append((correlation, _shifted(candidates[:, i], lag)))
    return found


def _best_lags(
    candidates: n.Floats, targets: n.Floats, lags: NDArray[np.int64]
) -> tuple[n.Doubles, NDArray[np.intp], n.Doubles]:
    """Returns the largest correlation of each pair, at which lag, and that without a lag."""
    shifted = np.stack([_shifted(targets, -int(lag)) for lag in lags], axis=2)
    records, count = targets.shape
    all_ = (candidates.T @ shifted.reshape(records, -1)).reshape(-1, count, len(lags))
    at = np.argmax(np.abs(all_), axis=2)
    best = np.take_along_axis(all_, at[..., None], axis=2)[..., 0].astype(np.float64)
    return best, at, all_[:, :, len(lags) // 2].astype(np.float64)


def _shifted(columns: n.Floats, lag: int) -> n.Floats:
    """Returns what was `lag` records before at each record, 0 where there was none."""
    found = np.zeros_like(columns)
    if lag > 0:
        found[lag:] = columns[:-lag]
    elif lag < 0:
        found[:lag] = columns[-lag:]
    else:
        found[:] = columns
    return found


def _in_steps(steps: NDArray[np.int64], lag: int) -> int:
    size = abs(lag)
    return int(np.sign(lag) * np.median(steps[size:] - steps[: len(steps) - size])) if lag else 0


def _clearest(steps: NDArray[np.int64], ours: n.Floats, theirs: n.Floats, lag: int) -> int:
    """Returns the step at which most of the correlation comes about, as `theirs` moves."""
    together = np.abs(_shifted(ours, lag) * theirs)
    return int(steps[int(np.argmax(together)) + 1])
