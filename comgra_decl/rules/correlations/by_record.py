"""Correlations between records: series that move together, and events that coincide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.correlations import statistics as n
from comgra_decl.rules.correlations.correlation import Candidate, Correlation, Side
from comgra_decl.rules.correlations.origin import Origin, is_loss_name, of_metric
from comgra_decl.rules.correlations.series import Series, is_group
from comgra_decl.rules.memory import Bools

LEAST_RECORDS = 40
"""Minimum number of records; with fewer records, chance correlations are too large."""

LEAST_STRENGTH = 0.3
"""Minimum correlation to report; weaker ones explain less than a tenth of the changes."""

SAME = 0.995
"""Minimum correlation at lag 0 at which two series count as the same quantity."""

_MOVE_LAGS = 50
_EVEN = 2.0  # ratio of gaps between records above which lags are meaningless


def lags_of(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lags to try, in records; 0 alone if records are unevenly spaced."""
    gaps = np.diff(steps)
    low, high = np.quantile(gaps, [0.1, 0.9]) if len(gaps) else (1, 1)
    most = min(_MOVE_LAGS, len(steps) // 8) if high <= _EVEN * low else 0
    return np.arange(-most, most + 1)


def moving(series: Series) -> list[Candidate]:
    """Return the series that move with each metric, with their changes.

    Omits the gradients of a loss that move with the loss in the same record, because they are
    computed from it.
    """
    if len(series.steps) < LEAST_RECORDS or not series.numbers:
        return []
    names = sorted(series.numbers, key=_results_first)
    targets = n.changes(np.stack([series.numbers[name] for name in names], axis=1))
    sides = [*series.sides, *(Side(name) for name in names)]
    candidates = np.concatenate([n.changes(series.values), targets], axis=1)
    return _clear(series, sides, names, candidates=candidates, targets=targets)


def _clear(
    series: Series, sides: list[Side], names: list[str], *, candidates: n.Floats, targets: n.Floats
) -> list[Candidate]:
    lags = lags_of(series.steps)
    best, at, same = _best_lags(candidates, targets, lags)
    own = (candidates != 0).sum(axis=0)[:, None]
    counts = np.minimum(own, (targets != 0).sum(axis=0)[None]) - np.abs(lags[at])
    free = n.independent(counts.astype(float), n.memory(candidates), n.memory(targets))
    chances = np.minimum(1.0, n.chance(best, free) * len(lags))
    origins = [*map(series.origin, range(len(series.sides))), *map(of_metric, names)]
    skip = _known(sides, names, origins=origins, lags=lags[at], same=same)
    shares = np.ones(chances.shape)
    shares[~skip] = n.false_shares(chances[~skip], int((~skip).sum()))
    found = []
    for i, k in zip(*np.nonzero(shares < 0.05), strict=True):
        effect, count = float(best[i, k]), float(free[i, k])
        low, high = n.interval(effect, count)
        lag = int(lags[at[i, k]])
        correlation = Correlation(
            kind="moves", first=sides[i], second=Side(names[k]), effect=effect, low=low, high=high,
            records=len(series.steps), count=int(count), q=float(shares[i, k]),
            lag_records=lag, lag_steps=_median_steps(series.steps, lag),
            first_step=_clearest(series.steps, candidates[:, i], targets[:, k], lag),
        )  # fmt: skip
        if correlation.strength >= LEAST_STRENGTH:
            found.append(Candidate(correlation, _shifted(candidates[:, i], lag), origins[i]))
    return found


def _results_first(name: str) -> tuple[bool, bool]:
    """Return a sort key for metrics: each pair then compares the cause with the result."""
    return not is_loss_name(name), of_metric(name) != Origin.OUTCOME


def _known(
    sides: list[Side], names: list[str], *, origins: list[Origin], lags: NDArray[np.int64],
    same: n.Doubles,
) -> Bools:  # fmt: skip
    """Return a mask of shape [sides, names] of the pairs that are trivially related.

    These are pairs of a metric with itself or an earlier metric, two names for one quantity, a loss
    and its parts, or a loss and its gradients.
    """
    rows = np.arange(len(sides))[:, None] - (len(sides) - len(names))
    skip = ((rows >= 0) & (rows <= np.arange(len(names))[None])) | (np.abs(same) > SAME)
    backward = np.array([origin == Origin.BACKWARD for origin in origins])[:, None]
    parts = np.array([side.place is None and is_loss_name(side.text) for side in sides])[:, None]
    results = np.array([of_metric(name) == Origin.OUTCOME for name in names])[None]
    losses = np.array([is_loss_name(name) for name in names])[None]
    follows = (lags <= 0) | (np.abs(same) >= LEAST_STRENGTH)
    return np.asarray(skip | (backward & results & follows) | (parts & losses))


def _best_lags(
    candidates: n.Floats, targets: n.Floats, lags: NDArray[np.int64]
) -> tuple[n.Doubles, NDArray[np.intp], n.Doubles]:
    """Return each pair's largest correlation, the index of its lag, and the value at lag 0."""
    shifted = np.stack([_shifted(targets, -int(lag)) for lag in lags], axis=2)
    records, count = targets.shape
    all_ = (candidates.T @ shifted.reshape(records, -1)).reshape(-1, count, len(lags))
    at = np.argmax(np.abs(all_), axis=2)
    best = np.take_along_axis(all_, at[..., None], axis=2)[..., 0].astype(np.float64)
    return best, at, all_[:, :, len(lags) // 2].astype(np.float64)


def _shifted(columns: n.Floats, lag: int) -> n.Floats:
    """Return the columns delayed by `lag` records, padded with 0."""
    found = np.zeros_like(columns)
    if lag > 0:
        found[lag:] = columns[:-lag]
    elif lag < 0:
        found[:lag] = columns[-lag:]
    else:
        found[:] = columns
    return found


def _median_steps(steps: NDArray[np.int64], lag: int) -> int:
    """Convert a lag in records to the median number of steps."""
    size = abs(lag)
    return int(np.sign(lag) * np.median(steps[size:] - steps[: len(steps) - size])) if lag else 0


def _clearest(steps: NDArray[np.int64], ours: n.Floats, theirs: n.Floats, lag: int) -> int:
    """Return the step of `theirs` that contributes most to the correlation."""
    together = np.abs(_shifted(ours, lag) * theirs)
    return int(steps[int(np.argmax(together)) + 1])


LEAST_EPISODES = 5
"""Minimum number of occurrences of an event to explain."""

LEAST_DIFFERENCE = 0.3
"""Minimum ratio of the other event's frequency in episodes to that in all records."""

_FAR = 4.0  # deviation of an event, in units of the usual deviation
_MOST = 0.2  # maximum share of records with an event
_EVENT_LAGS = 5


def happening(series: Series) -> list[Candidate]:
    """Return the events that coincide with abnormal metrics and with findings of rules.

    Omits the gradients of a loss that are abnormal in the same records as the loss.
    """
    if len(series.steps) < LEAST_RECORDS:
        return []
    targets = _episodes(series)
    sides, events, origins = _events(series)
    if not targets or not sides:
        return []
    lags = [lag for lag in lags_of(series.steps).tolist() if 0 <= lag <= _EVENT_LAGS]
    found, tried = [], 0
    for side, episodes in targets.items():
        rows, chances = _with(side, episodes, sides, events=events, lags=lags)
        compared = [
            (side, *row, chance)
            for row, chance in zip(rows, chances, strict=True)
            if not _is_own(side, origins[row[0]], row[1])
        ]
        tried += len(compared)
        found += compared
    shares = n.false_shares(np.array([row[-1] for row in found]), tried)
    reported = []
    for (side, i, lag, hits, count, base, at, _), share in zip(found, shares, strict=True):
        if share < 0.05:
            low, high = n.share_interval(hits, count)
            correlation = Correlation(
                kind="happens", first=sides[i], second=side, effect=hits / count, low=low,
                high=high, records=len(series.steps), count=count, q=float(share), base=base,
                lag_records=lag, lag_steps=_median_steps(series.steps, lag),
                first_step=int(series.steps[at]),
            )  # fmt: skip
            if correlation.strength >= LEAST_DIFFERENCE:
                reported.append(Candidate(correlation, events[:, i].astype(np.float32), origins[i]))
    return reported


def _is_own(side: Side, origin: Origin, lag: int) -> bool:
    """Return whether an event is about a gradient whose own loss is abnormal in that record."""
    return (
        lag == 0
        and origin == Origin.BACKWARD
        and side.event != ""
        and of_metric(side.text) == Origin.OUTCOME
    )


def _with(
    side: Side, episodes: NDArray[np.intp], sides: list[Side], *, events: Bools, lags: list[int]
) -> tuple[list[tuple[int, int, int, int, float, int]], list[float]]:
    """Return (event, lag, hits, episodes, base, example) of each event, and its p-value."""
    base = (events.sum(axis=0) + 1) / (len(events) + 2)
    rows, chances = [], []
    best = np.full(len(sides), 1.0)
    which = np.zeros((3, len(sides)), int)
    for lag in lags:
        at = episodes[episodes >= lag]
        hits = events[at - lag].sum(axis=0)
        chance = _tail(hits, max(1, len(at)), base)
        better = chance < best
        best[better] = chance[better]
        which[:, better] = np.stack([np.full(len(sides), lag), hits, np.full(len(sides), len(at))])[
            :, better
        ]
    for i in range(len(sides)):
        lag, hit, count = which[:, i].tolist()
        if sides[i].text == side.text or not count:
            continue
        example = next((int(e) for e in episodes if e >= lag and events[e - lag, i]), 0)
        rows.append((i, lag, hit, count, float(base[i]), example))
        chances.append(min(1.0, float(best[i]) * len(lags)))
    return rows, chances


def _tail(hits: NDArray[np.int64], count: int, base: n.Doubles) -> n.Doubles:
    """Return an upper bound on the probability of at least `hits` among `count` (Chernoff)."""
    share = hits / count
    with np.errstate(all="ignore"):
        ours = np.where(share > 0, share * np.log(share / base), 0)
        rest = np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - base)), 0)
    bound: n.Doubles = np.where(share > base, np.exp(-count * (ours + rest)), 1.0)
    return bound


def _episodes(series: Series) -> dict[Side, NDArray[np.intp]]:
    """Return the records at which the events to explain begin."""
    found: dict[Side, Bools] = dict(series.marks)
    for name, column in series.numbers.items():
        high, _ = abnormal(column[:, None])
        found[Side(name, event="abnormally high")] = high[:, 0]
    begins = {
        side: np.flatnonzero(mark & ~np.concatenate([[False], mark[:-1]]))
        for side, mark in found.items()
        if not is_group(side)
    }
    return {side: at for side, at in begins.items() if len(at) >= LEAST_EPISODES}


def _events(series: Series) -> tuple[list[Side], Bools, list[Origin]]:
    """Return all events that may coincide with an episode, and their origins in a step."""
    high, low = abnormal(series.values)
    sides = [
        Side(s.text, s.place, s.statistic, event)
        for event in ("abnormally high", "abnormally low")
        for s in series.sides
    ]
    marks = list(series.marks)
    columns = [high, low, *(series.marks[side][:, None] for side in marks)]
    events = np.concatenate(columns, axis=1)
    sides += marks
    origins = [series.origin(i) for i in range(len(series.sides))] * 2
    origins += [Origin.DATA if is_group(side) else Origin.OUTCOME for side in marks]
    often = events.sum(axis=0)
    chosen = np.flatnonzero((often >= LEAST_EPISODES - 1) & (often <= _MOST * len(events)))
    at = chosen.tolist()
    return [sides[i] for i in at], events[:, chosen], [origins[i] for i in at]


def abnormal(columns: n.Floats) -> tuple[Bools, Bools]:
    """Return masks [n, m] of the values far above and far below those of nearby records."""
    levels = n.levelled(columns)
    distance = levels - n.smoothed(levels)
    scale = n.smoothed(np.abs(distance))
    with np.errstate(all="ignore"):
        far = distance / scale
    return far > _FAR, far < -_FAR
