"""How many steps pass between two checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.hooks.schedule.idle import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.001, 32), (0.01, 25), (0.1, 2), (0.2, 1), (0.3, 0), (60, 0)]
)
def test_looks_are_a_quarter_of_a_second_apart(seconds: float, steps: int) -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now += 10 * seconds
    assert pace.steps(10) == pytest.approx(steps, abs=1 if steps == 25 else 0)


@given(st.lists(st.tuples(st.integers(-3, 40), st.floats(-1, 100)), max_size=20))
def test_no_pace_lets_more_than_32_steps_pass(steps: list[tuple[int, float]]) -> None:
    clock, step = Clock(), 0
    pace = Pace(clock)
    for passed, seconds in steps:
        step += passed
        clock.now += seconds
        assert 0 <= pace.steps(step) <= 32


def test_the_first_step_is_looked_at() -> None:
    assert Pace(Clock()).steps(0) == 0
