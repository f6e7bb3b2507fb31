"""Finds correlations in a run, and keeps the strongest of those that mean the same."""

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
"""How many correlations to return by default."""


def correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> list[Correlation]:
    """Returns the correlations in a stored run, strongest first.

    Compares losses and other metrics, the records at which rules fire, types of execution and
    tags, and statistics of tensors, record by record. Where single samples are recorded, compares
    their statistics with their losses and categories. Every comparison counts with all its lags;
    at most 5% of what is returned is expected to be due to chance.

    Args:
        run: as of its last `refresh`.
        rules: whose events to compare; None for those of the run's spec, or the default.
        trust: see `diagnose`.
        most: how many to return at most.
    """
    return among(series_of(run, rules, trust=trust)[0], most=most, run=run)


def diagnose_and_correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> tuple[Diagnosis, list[Correlation]]:
    """Returns the results of `diagnose` and `correlate`, reading all records once.

    Records of a distributed run are read twice, because correlations are those of all ranks joined.
    """
    if len(run.ranks) > 1:
        together = correlate(run, rules, trust=trust, most=most)
        return diagnose(run, rules, trust=trust), together
    series, engine = series_of(run, rules, trust=trust)
    return concluded(engine, run), among(series, most=most, run=run)


def among(series: Series, *, most: int = MOST, run: Run | None = None) -> list[Correlation]:
    """Returns the correlations among series; see `correlate`."""
    found = [*moving(series), *happening(series)]
    if run is not None:
        found += sampling(run)
    return grouped(found, most)


_ALIKE = 0.7
"""The least correlation at which two candidates count as one."""

MOST_ALSO = 20
"""How many others that move with a correlation to name."""

MOST_ALIKE = 4
"""How many of one kind about one target to return at most."""


def grouped(found: list[tuple[Correlation, Floats]], most: int) -> list[Correlation]:
    """Returns the strongest correlations, each with those that move with it.

    Args:
        found: correlations with the course of their candidates, aligned so that they compare.
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
    """Returns the node of the candidate, for any statistic, pass and iteration."""
    place = correlation.first.place
    return correlation.first.text if place is None else place.node


def _alike(one: Floats, other: Floats) -> bool:
    """Whether two courses are practically the same."""
    if one.shape != other.shape:
        return False
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return length > 0 and abs(float(one @ other)) / length >= _ALIKE
