"""The state of rules does not depend on how records are divided into windows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from comgra_decl.rules.memory import Early, Largest, Previous, Streak
from tests.support.shortened import examples

AT = np.array([3, 0, 2])


@st.composite
def story(draw: st.DrawFn) -> tuple[NDArray[np.float64], list[int]]:
    """Values [k, 3] with gaps, and where to divide them."""
    k = draw(st.integers(1, 14))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (k, 3)).astype(float)
    values[rng.random((k, 3)) < 0.25] = np.nan
    cuts = sorted(draw(st.sets(st.integers(0, k), max_size=4)))
    return values, [0, *cuts, k]


def cut(cuts: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cuts) if a < b]


@settings(max_examples=examples(150))
@given(story())
def test_memories_equal_a_plain_loop(told: tuple[NDArray[np.float64], list[int]]) -> None:
    values, cuts = told
    early, largest, previous = Early(3), Largest(), Previous()
    parts = [
        (early.look(AT, values[s]), largest.look(AT, values[s]), previous.look(AT, values[s]))
        for s in cut(cuts)
    ]
    got = [np.concatenate(some) for some in zip(*parts, strict=True)]
    want = np.full((3, *values.shape), np.nan)
    for column in range(3):
        seen: list[float] = []
        for row in range(len(values)):
            value = values[row, column]
            want[2, row, column] = seen[-1] if seen else np.nan
            if len(seen) >= 3:
                want[0, row, column] = np.median(seen[:3])
            if not np.isnan(value):
                seen.append(value)
            want[1, row, column] = max(seen) if seen else np.nan
    known = ~np.isnan(values)  # what is not recorded is never checked
    np.testing.assert_array_equal(got[0][known], want[0][known])
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[2], want[2])


@settings(max_examples=examples(200))
@given(story(), st.integers(1, 4), st.booleans())
def test_a_streak_equals_a_plain_loop(
    told: tuple[NDArray[np.float64], list[int]], patience: int, lowest: bool
) -> None:
    values, cuts = told
    streak = Streak(patience, lowest=lowest)
    steps = np.arange(0, 10 * len(values), 10)
    for s in cut(cuts):
        part = values[s]
        streak.look(steps[s], AT, hit=part > 0, present=~np.isnan(part), evidence=part)
    for column, slot in enumerate(AT):
        run, began, first, last, records, worst = 0, -1, -1, -1, 0, np.nan
        for step, value in zip(steps.tolist(), values[:, column].tolist(), strict=True):
            if np.isnan(value):
                continue
            run = run + 1 if value > 0 else 0
            began = step if run == 1 else began
            if run >= patience:
                first = began if first < 0 else first
                last, records = step, records + 1
                worst = np.fmin(worst, value) if lowest else np.fmax(worst, value)
        got = streak.first[slot], streak.last[slot], streak.records[slot]
        assert got == (first, last, records)
        np.testing.assert_equal(streak.worst[slot], worst)
