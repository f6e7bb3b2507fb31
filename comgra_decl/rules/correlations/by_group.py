"""Metrics whose values for a tag or type differ from those in nearby records."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.correlations import statistics as n
from comgra_decl.rules.correlations.by_record import LEAST_RECORDS, LEAST_STRENGTH
from comgra_decl.rules.correlations.correlation import Candidate, Correlation, Side
from comgra_decl.rules.correlations.origin import Origin
from comgra_decl.rules.correlations.series import Series

LEAST_MEMBERS = 5
"""Minimum number of records or samples inside a group, and outside it."""


def differing(series: Series) -> list[Candidate]:
    """Return the tags and types whose records have larger or smaller values of a metric."""
    groups = list(series.groups)
    if len(series.steps) < LEAST_RECORDS or not groups or not series.numbers:
        return []
    names = list(series.numbers)
    raw = np.stack([series.numbers[name] for name in names], axis=1)
    member = np.stack([series.groups[side] for side in groups], axis=1)
    labels = member.astype(np.float32)
    labels -= n.smoothed(labels)
    ranks = n.ranked(n.detrended(raw))
    return differences(
        member, labels, raw=raw, ranks=ranks, free=_free(labels, ranks), firsts=groups,
        seconds=[Side(name) for name in names], steps_of=lambda at: int(series.steps[at]),
        records=len(series.steps),
    )  # fmt: skip


def _free(labels: n.Floats, ranks: n.Floats) -> n.Doubles:
    """Return the number of independent records behind each pair, [groups, metrics].

    Differences between groups do not count as autocorrelation, because a metric that depends on
    alternating tags alternates too.
    """
    own, theirs = n.normalized(labels), n.normalized(ranks)
    count = (ranks != 0).sum(axis=0).astype(float)
    free = np.zeros((own.shape[1], theirs.shape[1]))
    memories = n.memory(own)
    for i in range(own.shape[1]):
        explained = own[:, i : i + 1] * (own[:, i] @ theirs)[None]
        rest = n.memory(n.normalized(theirs - explained))
        free[i] = n.independent(count[None], memories[:, i : i + 1], rest)[0]
    return free


def differences(
    member: NDArray[np.bool_],
    labels: n.Floats,
    *,
    raw: n.Floats,
    ranks: n.Floats,
    free: n.Doubles,
    firsts: list[Side],
    seconds: list[Side],
    steps_of: Callable[[int], int],
    records: int,
) -> list[Candidate]:
    """Return the statistically significant differences between groups.

    Compares ranks, so that individual large values have no additional influence.

    Args:
        member: whether each case belongs to each group, [cases, groups].
        labels: `member` as numbers, with the mean over comparable cases subtracted.
        raw: the values of each metric, [cases, metrics].
        ranks: the rank of each value among comparable cases, from -1 to 1; 0 where it is missing.
        free: the number of independent cases behind each pair, [groups, metrics].
        firsts: the names of the groups.
        seconds: the names of the metrics.
        steps_of: returns the step of a case.
        records: the number of records behind all cases.
    """
    own, theirs = n.normalized(labels), n.normalized(ranks)
    correlations = (own.T @ theirs).astype(np.float64)
    known = ranks != 0
    inside = member.T.astype(float) @ known
    outside = (~member).T.astype(float) @ known
    chances = n.chance(correlations, free)
    enough = (inside >= LEAST_MEMBERS) & (outside >= LEAST_MEMBERS)
    shares = np.ones(chances.shape)
    shares[enough] = n.false_shares(chances[enough], int(enough.sum()))
    found = []
    for i, k in zip(*np.nonzero(shares < 0.05), strict=True):
        there = known[:, k]
        slope = float(ranks[there, k] @ labels[there, i] / (labels[there, i] ** 2).sum())
        unit = slope / float(correlations[i, k])
        ends = n.interval(float(correlations[i, k]), float(free[i, k]))
        low, high = (float(np.clip(end * unit, -1, 1)) for end in ends)
        correlation = Correlation(
            kind="differs", first=firsts[i], second=seconds[k],
            effect=float(np.clip(slope, -1, 1)), low=low, high=high, records=records,
            count=int(inside[i, k]), total=int(inside[i, k] + outside[i, k]),
            q=float(shares[i, k]), first_step=steps_of(int(np.argmax(ranks[:, k] * labels[:, i]))),
            medians=_medians(raw[there, k], member[there, i], slope),
        )  # fmt: skip
        if correlation.strength >= LEAST_STRENGTH:
            found.append(Candidate(correlation, own[:, i], Origin.DATA))
    return found


def _medians(
    values: n.Floats, member: NDArray[np.bool_], effect: float
) -> tuple[float, float] | None:
    """Return the medians of members and others, if they differ in the direction of the effect."""
    inside, outside = float(np.median(values[member])), float(np.median(values[~member]))
    return (inside, outside) if (inside - outside) * effect > 0 else None
