"""Cases of which the normal suite runs some and the long suite all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest
from _pytest.mark import ParameterSet


def shortened(cases: Iterable[Any], *, tried: int, several: bool = False) -> list[ParameterSet]:
    """Return cases for `parametrize`; all but the first ones are marked slow.

    Args:
        cases: the values, one per case.
        tried: number of cases that the normal suite runs.
        several: whether `parametrize` has several names, so that each case is a tuple of values.
    """
    return [
        pytest.param(
            *(case if several else (case,)), marks=[] if number < tried else [pytest.mark.slow]
        )
        for number, case in enumerate(cases)
    ]


def examples(most: int) -> int:
    """Return how many examples Hypothesis tries: in the normal suite, a quarter of `most`."""
    long = hypothesis.settings().max_examples >= 100
    return most if long else max(5, most // 4)


def combined(*axes: Sequence[Any], rounds: int) -> list[ParameterSet]:
    """Return all combinations for `parametrize` with several names; most are marked slow.

    Every value of every axis occurs in the cases that the normal suite runs.

    Args:
        axes: the values of each name.
        rounds: largest number of cases in the normal suite for each value of the longest axis.
    """
    tried = {
        tuple((number + turn * shift) % len(axis) for shift, axis in enumerate(axes))
        for number in range(max(map(len, axes)))
        for turn in range(rounds)
    }
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, place, strict=True)),
            marks=[] if place in tried else [pytest.mark.slow],
        )
        for place in places
    ]
