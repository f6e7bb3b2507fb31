"""Schedules: which steps are recorded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.spec import Scheduler, load_spec
from comgra_decl.spec.schedule import EvalSpec, ScheduleSpec

SCHEDULES = st.builds(
    ScheduleSpec,
    first=st.integers(0, 40),
    every=st.integers(1, 30),
    backoff=st.one_of(st.just(1.0), st.floats(1, 5), st.floats(1, 1 + 1e-9)),
)


def walked(schedule: ScheduleSpec, count: int) -> list[int]:
    """The first `count` recorded steps, as a training asks for them."""
    scheduler = Scheduler(schedule)
    steps = [-1]
    for _ in range(count):
        following = scheduler.next_after(steps[-1])
        if following is None:
            break
        steps.append(following)
    return steps[1:]


def spelled_out(schedule: ScheduleSpec) -> Iterator[int]:
    """The documented rule, word by word."""
    yield from range(schedule.first)
    step = math.ceil(schedule.first / schedule.every) * schedule.every
    gap = 0
    while True:
        yield step
        step += math.floor(schedule.every * schedule.backoff**gap)
        gap += 1


@given(SCHEDULES)
def test_the_recorded_steps_are_those_of_the_documented_rule(schedule: ScheduleSpec) -> None:
    expected = spelled_out(schedule)
    assert walked(schedule, 60) == [next(expected) for _ in range(60)]


@given(SCHEDULES)
def test_recorded_steps_increase_and_begin_at_the_very_first(schedule: ScheduleSpec) -> None:
    steps = walked(schedule, 60)
    assert steps[0] == 0
    assert all(a < b for a, b in itertools.pairwise(steps))


@given(SCHEDULES)
def test_gaps_never_shrink_once_they_back_off(schedule: ScheduleSpec) -> None:
    steps = [s for s in walked(schedule, 80) if s >= schedule.first]
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps == sorted(gaps)


@given(SCHEDULES, st.lists(st.integers(-1, 3000), max_size=20))
def test_the_answer_does_not_depend_on_what_was_asked_before(
    schedule: ScheduleSpec, questions: list[int]
) -> None:
    asked_before = Scheduler(schedule)
    for step in questions:
        answer = asked_before.next_after(step)
        assert answer == Scheduler(schedule).next_after(step)
        assert answer is not None
        assert answer > step


@given(SCHEDULES, st.integers(-1, 3000))
def test_no_recorded_step_is_passed_over(schedule: ScheduleSpec, step: int) -> None:
    expected = next(s for s in spelled_out(schedule) if s > step)
    assert Scheduler(schedule).next_after(step) == expected


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_an_explicit_list_is_recorded_exactly(steps: list[int]) -> None:
    schedule = ScheduleSpec(steps=steps, first=7, every=3, backoff=2)
    assert walked(schedule, 100) == sorted(set(steps))


def test_without_backoff_the_multiples_of_every_are_recorded() -> None:
    assert walked(ScheduleSpec(first=3, every=50), 7) == [0, 1, 2, 50, 100, 150, 200]
    assert walked(ScheduleSpec(first=0, every=50), 3) == [0, 50, 100]


def test_with_backoff_a_long_training_has_few_records() -> None:
    schedule = load_spec("debug").schedule
    steps = walked(schedule, 200)
    assert sum(step < 100_000 for step in steps) < 150
    assert steps[:15] == list(range(15))


@pytest.mark.parametrize(
    ("evaluation", "due"),
    [
        (EvalSpec(every=1), [0, 1, 2, 3, 4, 5]),
        (EvalSpec(every=3), [0, 3]),
        (None, []),
    ],
)
def test_evaluation_phases(evaluation: EvalSpec | None, due: list[int]) -> None:
    scheduler = Scheduler(ScheduleSpec(eval=evaluation))
    assert [phase for phase in range(6) if scheduler.eval_due(phase)] == due
