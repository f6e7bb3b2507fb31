"""Which steps leave the ring, compared with a definition that sees all steps at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.keep.ring import Allowance, Entry, Ring

Steps = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)
"""For each step: whether the schedule records it, and whether a trigger fires."""


def play(ring: Ring[int], steps: list[tuple[bool, bool]]) -> list[Entry[int]]:
    stored = []
    for step, (scheduled, fires) in enumerate(steps):
        stored += ring.push(Entry(step, scheduled, step), ["spike: big"] if fires else [])
    return [*stored, *ring.flush()]


def near(steps: list[tuple[bool, bool]], step: int, before: int, after: int) -> bool:
    """Whether a trigger fires close enough to the step for it to be kept."""
    return any(fires for _, fires in steps[max(0, step - after) : step + before + 1])


@given(Steps, st.integers(0, 7), st.integers(0, 5), st.booleans())
def test_what_is_scheduled_or_near_a_fire_is_stored_once_and_in_order(
    steps: list[tuple[bool, bool]], before: int, after: int, patient: bool
) -> None:
    ring: Ring[int] = Ring(before=before, after=after, allowance=Allowance(None), patient=patient)
    expected = [
        step
        for step, (scheduled, _) in enumerate(steps)
        if scheduled or near(steps, step, before, after)
    ]
    assert [entry.payload for entry in play(ring, steps)] == expected
    assert not ring.pending


@given(Steps, st.integers(0, 7), st.integers(0, 5))
def test_everything_kept_says_why_and_nothing_else_does(
    steps: list[tuple[bool, bool]], before: int, after: int
) -> None:
    ring: Ring[int] = Ring(before=before, after=after, allowance=Allowance(None), patient=True)
    for entry in play(ring, steps):
        assert bool(entry.reasons) == near(steps, entry.step, before, after)
        assert ("spike: big" in entry.reasons) == steps[entry.step][1]
        for reason in entry.reasons:
            if reason.startswith("before"):
                fired = int(reason.removeprefix("before spike at "))
                assert steps[fired][1]
                assert entry.step < fired <= entry.step + before


@given(Steps, st.integers(0, 7), st.integers(0, 5), st.integers(1, 10))
def test_no_more_than_at_most_are_kept_and_the_schedule_does_not_count(
    steps: list[tuple[bool, bool]], before: int, after: int, at_most: int
) -> None:
    ring: Ring[int] = Ring(before=before, after=after, allowance=Allowance(at_most))
    stored = play(ring, steps)
    wanted = [n for n, (s, _) in enumerate(steps) if not s and near(steps, n, before, after)]
    kept = [entry.step for entry in stored if not entry.scheduled]
    assert [e.step for e in stored if e.scheduled] == [n for n, (s, _) in enumerate(steps) if s]
    assert len(kept) == min(at_most, len(wanted))
    assert [e.step for e in stored] == sorted(e.step for e in stored)
    assert ring.exhausted == (len(kept) == at_most)


@given(Steps, st.integers(0, 7))
def test_no_more_wait_than_the_ring_is_long(steps: list[tuple[bool, bool]], before: int) -> None:
    ring: Ring[int] = Ring(before=before, after=0, allowance=Allowance(None))
    for step, (scheduled, fires) in enumerate(steps):
        ring.push(Entry(step, scheduled, step), ["x"] if fires else [])
        assert len(ring.pending) <= before


def test_what_is_left_is_given_to_the_step_itself_and_then_to_the_nearest() -> None:
    ring: Ring[int] = Ring(before=5, after=0, allowance=Allowance(3))
    steps = [(False, step == 9) for step in range(12)]
    assert [entry.step for entry in play(ring, steps)] == [7, 8, 9]


def test_a_scheduled_step_does_not_wait_unless_something_older_does() -> None:
    ring: Ring[int] = Ring(before=3, after=0, allowance=Allowance(None))
    stored = [ring.push(Entry(step, scheduled=True, payload=step), []) for step in range(3)]
    assert [len(each) for each in stored] == [1, 1, 1]
    assert ring.push(Entry(3, scheduled=False, payload=3), []) == []
    assert ring.push(Entry(4, scheduled=True, payload=4), []) == []
    assert ring.push(Entry(5, scheduled=False, payload=5), []) == []
    assert [e.step for e in ring.push(Entry(6, scheduled=False, payload=6), [])] == [4]


def test_memory_is_given_back_oldest_first_and_scheduled_steps_are_stored() -> None:
    ring: Ring[int] = Ring(before=10, after=0, allowance=Allowance(None))
    for step in range(6):
        ring.push(Entry(step, step == 2, step, nbytes=10), [])
    stored, lost = ring.shrink(35)
    assert [entry.step for entry in stored] == [2]
    assert (lost, [entry.step for entry in ring.pending]) == (2, [3, 4, 5])
    assert ring.shrink(35) == ([], 0)
