"""Looks for what goes together in a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from comgra_decl.rules.correlations.by_record import happening, moving
from comgra_decl.rules.correlations.by_sample import sampling
from comgra_decl.rules.correlations.correlation import Correlation
from comgra_decl.rules.correlations.series import Series, series_of
from comgra_decl.rules.diagnosis import Diagnosis, concluded, diagnose
from comgra_decl.rules.window import Floats

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.spec.rules import Rules

MOST = 10
"""More than that nobody reads."""


def correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> list[Correlation]:
    """Returns what goes together in a stored run, strongest first.

    Losses and the program's other numbers, the records at which rules fire, types of execution and
    tags, and statistics of tensors are compared by record; where single samples are recorded, their
    statistics are compared with their losses and categories. Of each comparison all lags count as
    tried; at most 5 % of all that is returned is expected to be chance.

    Args:
        run: as of its last `refresh`.
        rules: whose events are looked at; None for those of the run's spec, or the default.
        trust: see `diagnose`.
        most: how many to return at most.
    """
    return among(series_of(run, rules, trust=trust)[0], most=most, run=run)


def diagnose_and_correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> tuple[Diagnosis, list[Correlation]]:
    """Returns what `diagnose` and `correlate` do, in one look at all records.

    Of a distributed training it takes two: correlations are those of all ranks joined.
    """
    if len(run.ranks) > 1:
        together = correlate(run, rules, trust=trust, most=most)
        return diagnose(run, rules, trust=trust), together
    series, engine = series_of(run, rules, trust=trust)
    return concluded(engine, run), among(series, most=most, run=run)


def among(series: Series, *, most: int = MOST, run: Run | None = None) -> list[Correlation]:
    """Returns what goes together in series; see `correlate`."""
    found = [*moving(series), *happening(series)]
    if run is not None:
        found += sampling(run)
    return grouped(found, most)


_ALIKE = 0.7
"""Correlation from which on two candidates say the same of a target."""

MOST_ALSO = 20

MOST_ALIKE = 4
"""So many of the same kind about the same target leave room for others."""


def grouped(found: list[tuple[Correlation, Floats]], most: int) -> list[Correlation]:
    """Returns the strongest, each with the others that move with it, at most `most`.

    Args:
        found: each with its candidate's course, so shifted that courses can be compared.
        most: how many to return.
    """
    ranked = sorted(found, key=lambda pair: -pair[0].strength)
    leaders: list[tuple[Correlation, Floats]] = []
    members: list[list[Correlation]] = []
    for correlation, course in ranked:
        for at, (leader, theirs) in enumerate(leaders):
            if _same(correlation, leader) and (
                _node(correlation) == _node(leader) or _alike(course, theirs)
            ):
                members[at].append(correlation)
                break
        else:
            rivals = sum(_same(correlation, leader) for leader, _ in leaders)
            if len(leaders) < most and rivals < MOST_ALIKE:
                leaders.append((correlation, course))
                members.append([])
    return [
        replace(leader, also=tuple(m.first for m in group[:MOST_ALSO]))
        for (leader, _), group in zip(leaders, members, strict=True)
    ]


def _same(one: Correlation, other: Correlation) -> bool:
    return one.kind == other.kind and one.second == other.second


def _node(correlation: Correlation) -> str:
    """Returns the tensor of the candidate, whichever statistic, pass and iteration."""
    place = correlation.first.place
    return correlation.first.text if place is None else place.node


def _alike(one: Floats, other: Floats) -> bool:
    """Whether two courses are one as far as numbers tell."""
    if one.shape != other.shape:
        return False
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return length > 0 and abs(float(one @ other)) / length >= _ALIKE
