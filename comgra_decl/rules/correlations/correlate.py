"""Finds correlations in a run, and reports only the most upstream of equivalent ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from comgra_decl.rules.correlations.by_group import differing
from comgra_decl.rules.correlations.by_record import happening, moving
from comgra_decl.rules.correlations.by_sample import sampling
from comgra_decl.rules.correlations.correlation import Candidate, Correlation, Side
from comgra_decl.rules.correlations.origin import is_loss_name
from comgra_decl.rules.correlations.series import Series, series_of
from comgra_decl.rules.diagnosis import Diagnosis, concluded, diagnose
from comgra_decl.rules.window import Floats

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.spec.rules import Rules

MOST = 10
"""Default number of correlations to return."""


def correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> list[Correlation]:
    """Return the most upstream correlations in a stored run; those with the loss come first.

    Compares the following quantities record by record: losses and other metrics, the records in
    which rules report a problem, types of execution and tags, and statistics of tensors. If
    individual samples are recorded, also compares their statistics with their losses and
    categories, and their categories with their losses. The correction for multiple comparisons
    includes every comparison with all its lags. At most 5% of the results are expected to be due to
    chance. A loss is not compared with its own target and gradients.

    Args:
        run: as of its last `refresh`.
        rules: the rules whose events are compared. None for the rules in the run's spec, or the
            default.
        trust: see `diagnose`.
        most: maximum number of correlations to return.
    """
    series, engine = series_of(run, rules, trust=trust)
    return among(series, most=most, samples=sampling(run, engine.scene))


def diagnose_and_correlate(
    run: Run, rules: Rules | None = None, *, trust: bool = False, most: int = MOST
) -> tuple[Diagnosis, list[Correlation]]:
    """Return the results of `diagnose` and `correlate`, reading all records once.

    The records of a distributed run are read twice, because correlations use the joined ranks.
    """
    if len(run.ranks) > 1:
        together = correlate(run, rules, trust=trust, most=most)
        return diagnose(run, rules, trust=trust), together
    series, engine = series_of(run, rules, trust=trust)
    together = among(series, most=most, samples=sampling(run, engine.scene))
    return concluded(engine, run), together


def among(
    series: Series, *, most: int = MOST, samples: Sequence[Candidate] = ()
) -> list[Correlation]:
    """Return the correlations between series and those across samples; see `correlate`."""
    return grouped([*samples, *differing(series), *moving(series), *happening(series)], most)


_ALIKE = 0.7
"""Minimum correlation at which two candidates count as equivalent."""

_WEAKER = 0.6
"""Minimum relative strength at which an upstream candidate represents another one."""

MOST_ALSO = 20
"""Maximum number of equivalent candidates to name with a correlation."""

MOST_ALIKE = 4
"""Maximum number of correlations of one kind about one target."""


def grouped(found: Sequence[Candidate], most: int) -> list[Correlation]:
    """Return the correlations to report, each with the candidates that move with it.

    Correlations with the loss come first. Among candidates that move together, the most upstream
    one in a training step represents the others.

    Args:
        found: all candidates.
        most: maximum number to return.
    """
    leaders: list[Candidate] = []
    members: list[list[Correlation]] = []
    for candidate in sorted(found, key=_rank):
        for at, leader in enumerate(leaders):
            if _stands_for(leader, candidate):
                members[at].append(candidate.correlation)
                break
        else:
            rivals = sum(_same(candidate.correlation, leader.correlation) for leader in leaders)
            if len(leaders) < most and rivals < MOST_ALIKE:
                leaders.append(candidate)
                members.append([])
    return [
        replace(leader.correlation, also=_named(leader.correlation, group))
        for leader, group in zip(leaders, members, strict=True)
    ]


def _named(leader: Correlation, group: list[Correlation]) -> tuple[Side, ...]:
    """Return the other candidates that move with a correlation, without duplicates.

    Omits the complement of a group, which necessarily shows the opposite difference.
    """
    names = (
        m.first
        for m in group
        if m.first != leader.first and not (m.kind == "differs" and m.effect * leader.effect < 0)
    )
    return tuple(dict.fromkeys(names))[:MOST_ALSO]


def _rank(candidate: Candidate) -> tuple[bool, int, float, bool]:
    """Return a sort key for candidates; of complementary groups, the larger comes first."""
    correlation = candidate.correlation
    about_loss = is_loss_name(correlation.second.text)
    strength = round(correlation.strength, 3)
    return not about_loss, candidate.origin, -strength, correlation.effect < 0


def _stands_for(leader: Candidate, candidate: Candidate) -> bool:
    """Return whether the report of the leading candidate covers another candidate."""
    ours, theirs = candidate.correlation, leader.correlation
    if ours.first.text == theirs.first.text and ours.second.text == theirs.second.text:
        return True  # an event and a difference of the same tag
    if not _same(ours, theirs) or theirs.strength < _WEAKER * ours.strength:
        return False
    return _node(ours) == _node(theirs) or _alike(candidate.course, leader.course)


def _same(one: Correlation, other: Correlation) -> bool:
    return one.kind == other.kind and one.second == other.second


def _node(correlation: Correlation) -> str:
    """Return the node of a candidate, regardless of statistic, pass and iteration."""
    place = correlation.first.place
    return correlation.first.text if place is None else place.node


def _alike(one: Floats, other: Floats) -> bool:
    """Return whether two aligned series are practically identical."""
    if one.shape != other.shape:
        return False
    length = float(np.linalg.norm(one) * np.linalg.norm(other))
    return length > 0 and abs(float(one @ other)) / length >= _ALIKE
