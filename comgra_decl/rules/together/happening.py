"""Events that come together: a number abnormally high, a rule that fires, a tensor near zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.together import numbers as n
from comgra_decl.rules.together.correlation import Correlation, Side
from comgra_decl.rules.together.moving import LEAST_RECORDS, lags_of
from comgra_decl.rules.together.series import Series

Bools = NDArray[np.bool_]

LEAST_EPISODES = 5
"""An event must have come so often to say with what it comes."""

LEAST_DIFFERENCE = 0.3
"""The share of episodes with the other event must exceed its share of all records by so much."""

_FAR = 4.0  # usual distances from the usual: an event
_MOST = 0.2  # what is so in more of the records is no event
_LAGS = 5


def happening(series: Series) -> list[tuple[Correlation, n.Floats]]:
    """Returns which events come with abnormal numbers and with rules that fire."""
    if len(series.steps) < LEAST_RECORDS:
        return []
    targets = _episodes(series)
    sides, events = _events(series)
    if not targets or not sides:
        return []
    lags = [lag for lag in lags_of(series.steps).tolist() if 0 <= lag <= _LAGS]
    found, tried = [], 0
    for side, episodes in targets.items():
        rows, chances = _with(side, episodes, sides, events=events, lags=lags)
        tried += len(rows)
        found += [(side, *row, chance) for row, chance in zip(rows, chances, strict=True)]
    shares = n.false_shares(np.array([row[-1] for row in found]), tried)
    reported = []
    for (side, i, lag, hits, count, base, at, _), share in zip(found, shares, strict=True):
        if share < 0.05:
            low, high = n.share_interval(hits, count)
            correlation = Correlation(
                kind="happens", first=sides[i], second=side, effect=hits / count, low=low,
                high=high, records=len(series.steps), count=count, q=float(share), base=base,
                lag_records=lag, lag_steps=_steps(series.steps, lag),
                first_step=int(series.steps[at]),
            )  # fmt: skip
            if correlation.strength >= LEAST_DIFFERENCE:
                reported.append((correlation, events[:, i].astype(np.float32)))
    return reported


def _with(
    side: Side, episodes: NDArray[np.intp], sides: list[Side], *, events: Bools, lags: list[int]
) -> tuple[list[tuple[int, int, int, int, float, int]], list[float]]:
    """Returns (event, lag, hits, episodes, base, example) of each event, and its chance."""
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
    """Returns a bound of the chance of so many hits or more among `count` (Chernoff)."""
    share = hits / count
    with np.errstate(all="ignore"):
        ours = np.where(share > 0, share * np.log(share / base), 0)
        rest = np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - base)), 0)
    bound: n.Doubles = np.where(share > base, np.exp(-count * (ours + rest)), 1.0)
    return bound


def _episodes(series: Series) -> dict[Side, NDArray[np.intp]]:
    """Returns at which records the events that are asked about begin."""
    found: dict[Side, Bools] = dict(series.marks)
    for name, column in series.numbers.items():
        high, _ = abnormal(column[:, None])
        found[Side(name, event="abnormally high")] = high[:, 0]
    begins = {
        side: np.flatnonzero(mark & ~np.concatenate([[False], mark[:-1]]))
        for side, mark in found.items()
        if not side.text.startswith(("type ", "tag "))
    }
    return {side: at for side, at in begins.items() if len(at) >= LEAST_EPISODES}


def _events(series: Series) -> tuple[list[Side], Bools]:
    """Returns everything that may come with an episode."""
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
    often = events.sum(axis=0)
    chosen = np.flatnonzero((often >= LEAST_EPISODES - 1) & (often <= _MOST * len(events)))
    return [sides[i] for i in chosen.tolist()], events[:, chosen]


def abnormal(columns: n.Floats) -> tuple[Bools, Bools]:
    """Returns where values are far above and far below those of the records around, [n, m]."""
    levels = n.levelled(columns)
    distance = levels - n.smoothed(levels)
    scale = n.smoothed(np.abs(distance))
    with np.errstate(all="ignore"):
        far = distance / scale
    return far > _FAR, far < -_FAR


def _steps(steps: NDArray[np.int64], lag: int) -> int:
    return int(np.median(steps[lag:] - steps[: len(steps) - lag])) if lag else 0
