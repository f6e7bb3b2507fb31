"""Of many that say the same, the clearest; and of those only a few."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.together.correlation import Correlation
from comgra_decl.rules.together.numbers import Floats

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
