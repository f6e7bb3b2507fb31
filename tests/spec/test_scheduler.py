"""Schedules: which steps are recorded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.spec import Scheduler, load_spec
from comgra_decl.spec.schedule import CadenceSpec, ScheduleSpec

SCHEDULES = st.builds(
    ScheduleSpec,
    first=st.integers(0, 40),
    every=st.integers(1, 30),
    backoff=st.one_of(st.just(1.0), st.floats(1, 5), st.floats(1, 1 + 1e-9)),
)


def walked(schedule: ScheduleSpec, count: int) -> list[int]:
    """Returns the first `count` recorded steps, queried as training does."""
    scheduler = Scheduler(schedule)
    steps = [-1]
    for _ in range(count):
        following = scheduler.next_after(steps[-1])
        if following is None:
            break
        steps.append(following)
    return steps[1:]


def spelled_out(schedule: ScheduleSpec) -> Iterator[int]:
    """The documented rule, word for word."""
    yield from range(schedule.first)
    assert schedule.every is not None
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


WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=4).map(
    lambda pairs: [[first, first + length] for first, length in pairs]
)
CADENCES = st.builds(
    CadenceSpec,
    first=st.integers(0, 10),
    every=st.one_of(st.none(), st.integers(1, 30)),
    backoff=st.floats(1, 3),
    steps=st.one_of(st.none(), st.lists(st.integers(0, 70), min_size=1, max_size=6)),
    windows=WINDOWS,
)


def counted_out(cadence: CadenceSpec, end: int) -> set[int]:
    """Returns all recorded steps below `end`, by checking each one."""
    recorded = {s for first, last in cadence.windows for s in range(first, last + 1)}
    if cadence.steps is not None:
        recorded |= set(cadence.steps)
    elif cadence.every is None:
        recorded |= set(range(cadence.first))
    else:
        rule = spelled_out(
            ScheduleSpec(**cadence.model_dump(include={"first", "every", "backoff"}))
        )
        recorded |= set(itertools.takewhile(lambda step: step < end, rule))
    return {step for step in recorded if step < end}


@given(CADENCES)
def test_windows_and_lists_add_exactly_their_steps(cadence: CadenceSpec) -> None:
    walk = itertools.takewhile(lambda step: step < 100, walked_on(cadence))
    assert list(walk) == sorted(counted_out(cadence, 100))


@given(CADENCES, st.lists(st.integers(-1, 90), max_size=10))
def test_the_next_step_is_the_same_whatever_was_asked_before(
    cadence: CadenceSpec, questions: list[int]
) -> None:
    scheduler, recorded = Scheduler(cadence), counted_out(cadence, 400)
    for step in questions:
        answer = scheduler.next_after(step)
        expected = min((s for s in recorded if s > step), default=None)
        assert answer == expected or (expected is None and answer is not None and answer >= 400)


def walked_on(cadence: CadenceSpec) -> Iterator[int]:
    scheduler = Scheduler(cadence)
    step = scheduler.next_after(-1)
    while step is not None:
        yield step
        step = scheduler.next_after(step)


def test_windows_alone_record_nothing_else() -> None:
    schedule = ScheduleSpec(first=0, every=None, windows=[[20, 22], [5, 6]])
    assert walked(schedule, 100) == [5, 6, 20, 21, 22]


def test_what_is_listed_can_be_told_from_what_follows_a_rule() -> None:
    schedule = ScheduleSpec(first=5, every=2, windows=[[9, 9]])
    listed = Scheduler(schedule, explicit=True)
    assert [listed.next_after(step) for step in (-1, 8, 9)] == [9, 9, None]
