"""What a finding can still request, compared with a definition that sees all steps at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.keep.finding_ring import Answer, FindingRing, Request
from comgra_decl.keep.ring import Allowance, Entry, Ring

STEPS, BEFORE, AFTER = 40, 4, 2
Steps = st.sets(st.integers(0, STEPS - 1), max_size=6)


def play(
    scheduled: set[int], found: dict[int, int], cuts: set[int]
) -> tuple[list[Entry[int]], list[Answer]]:
    """Makes the rules report a finding about step `value` when they check step `key`."""
    shown: list[int] = []
    answers: list[Answer] = []

    def watch(entries: Sequence[Entry[int]]) -> list[Request]:
        shown.extend(entry.step for entry in entries)
        now = [entry.step for entry in entries]
        return [Request(found[step], "finding x") for step in now if step in found]

    ring: Ring[int] = Ring(before=BEFORE, after=AFTER, allowance=Allowance(None))
    second = FindingRing(ring, watch=watch, answer=answers.append)
    stored, waiting = [], []
    for step in range(STEPS):
        waiting.append(Entry(step, step in scheduled, step))
        if step in cuts:
            stored += second(waiting)
            waiting = []
    stored += second.close(waiting)
    assert shown == sorted(scheduled)  # neither what was kept only for a finding nor repeats
    return stored, answers


@given(Steps, Steps, Steps)
def test_the_steps_around_a_finding_are_stored_in_order_however_many_come_at_once(
    scheduled: set[int], wild: set[int], cuts: set[int]
) -> None:
    scheduled |= wild
    stored, answers = play(scheduled, {step: step for step in wild}, cuts)
    near = {s for s in range(STEPS) for w in wild if w - BEFORE <= s <= w + AFTER}
    assert [entry.step for entry in stored] == sorted(scheduled | near)
    assert {entry.step for entry in stored if entry.seen} == scheduled
    reasons = {entry.step for entry in stored if entry.reasons}
    assert reasons - scheduled == near - scheduled  # a scheduled one may have left earlier
    assert wild <= reasons <= near
    assert [(a.request.step, a.kept and a.kept[1]) for a in answers] == [
        (step, step) for step in sorted(wild)
    ]


@pytest.mark.parametrize(("began", "first", "at"), [(28, 26, 28), (10, 26, 30)])
def test_a_step_that_has_left_gives_way_to_the_newest(began: int, first: int, at: int) -> None:
    stored, (answer,) = play({10, 20, 30}, {30: began}, set(range(STEPS)))
    assert answer.kept == (first, at)
    kept = [entry.step for entry in stored if entry.reasons]
    assert kept == [*range(first, at + AFTER + 1)]
