"""When a fault began: a step, or an interval between records, narrowed by every step's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from comgra_decl.rules import Finding
from comgra_decl.rules.finding import began, since
from comgra_decl.rules.memory import Streak
from comgra_decl.rules.precision.nonfinite import Nonfinite
from tests.rules.tape import Tape

NAN = float("nan")


def tape_of_weight(steps: list[int], bad_from: int) -> Tape:
    """A weight and its layer's output, recorded at `steps`, with NaN from one of them on."""
    tape = Tape()
    weight = tape.slot("layer", (2, 3), role="weight", kind="parameter")
    out = tape.slot("layer", (4, 3))
    for step in steps:
        fill = NAN if step >= bad_from else 1.0
        tape.record({weight: np.full((2, 3), fill), out: np.full((4, 3), fill)}, step=step)
    return tape


def only(tape: Tape, window: int) -> Finding:
    (found,) = tape.findings(Nonfinite(), window=window)
    return found


@pytest.mark.parametrize("window", [1, 3, 50])
def test_the_loss_of_every_step_narrows_the_interval_between_two_records(window: int) -> None:
    tape = tape_of_weight([0, 30, 72, 80, 88], bad_from=80)
    tape.losses([1.0] * 74 + [NAN] * 20)
    found = only(tape, window)
    assert (str(found.place), found.after_step, found.first_step) == ("layer weight", 72, 74)
    assert found.began == "between steps 73 and 74"
    assert found.evidence["first recorded at"] == 80
    assert "happened before the forward pass" in found.message
    assert "backward pass or the update of step 73" in found.message


def test_without_losses_it_is_the_interval_between_the_records() -> None:
    found = only(tape_of_weight([0, 30, 72, 80, 88], bad_from=80), 7)
    assert (found.after_step, found.first_step) == (72, 80)
    assert found.span == "between steps 73 and 80, until step 88"
    assert "at step 80, but not in the previous record, step 72" in found.message


@pytest.mark.parametrize(
    ("losses", "after", "first"),
    [
        ([1.0] * 75 + [NAN] + [1.0] * 10, 72, 80),  # a bad loss that recovers is something else
        ([NAN] * 75 + [1.0] * 10, 72, 80),  # so are earlier ones
        ([1.0] * 82 + [NAN] * 4, 72, 80),  # it follows later and provides no evidence
        ([1.0] * 80 + [NAN] * 4, 78, 80),
        ([1.0] * 76 + [NAN] * 8, 74, 76),
    ],
)
def test_only_a_loss_that_stays_bad_until_the_record_narrows_it(
    losses: list[float], after: int, first: int
) -> None:
    tape = tape_of_weight([0, 30, 72, 80, 88], bad_from=80)
    tape.losses(losses)
    found = only(tape, 4)
    assert (found.after_step, found.first_step) == (after, first)


def test_weights_spoilt_by_the_step_before_are_told_from_the_step_that_meets_them() -> None:
    found = only(tape_of_weight([4, 5, 6], bad_from=6), 2)
    assert (found.first_step, found.is_exact, found.span) == (6, True, "step 6")
    assert found.message.endswith(
        "from step 6 on; this happened before the forward pass, in the backward pass or update of "
        "step 5."
    )


def test_a_run_that_is_bad_from_its_first_record_has_no_earlier_step() -> None:
    found = only(tape_of_weight([3, 4], bad_from=0), 2)
    assert (found.first_step, found.after_step, found.began) == (3, None, "step 3")
    assert Finding.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("first", "after", "words"),
    [
        (7, None, "from step 7 on"),
        (7, 6, "from step 7 on"),
        (7, 5, "starting between steps 6 and 7"),
    ],
)
def test_words_for_the_beginning(first: int, after: int | None, words: str) -> None:
    assert since(first, after) == words
    assert began(first, after) in words


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_a_streak_knows_the_record_before_it_that_has_the_slot(window: int) -> None:
    steps = np.array([0, 2, 5, 9, 14, 20, 27, 35])
    hit = np.array([[0, 0, 0, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    there = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])
    streak = Streak(2)
    at = np.arange(3)
    for start in range(0, 8, window):
        rows = slice(start, start + window)
        part: Any = hit.T[rows].astype(bool)
        streak.look(
            steps[rows], at, hit=part, present=there.T[rows].astype(bool), evidence=part * 1.0
        )
    assert streak.first.tolist() == [20, 27, 0]
    assert streak.after.tolist() == [14, 5, -1]
    assert [streak.after_step(slot) for slot in range(3)] == [14, 5, None]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize(
    ("held", "free", "unknown", "lasts"),
    [
        (4, 3, 0, True),
        (4, 4, 0, False),  # free of it for as many records as it held
        (4, 3, 9, True),  # what is unknown is not known to be free of it
        (3, 2, 0, True),
        (3, 3, 0, False),
        (12, 11, 0, True),
    ],
)
def test_a_state_is_over_when_it_has_been_gone_for_as_long_as_it_held(
    window: int, held: int, free: int, unknown: int, lasts: bool
) -> None:
    evidence = np.array([0.0] * 5 + [1.0] * held + [0.0] * free + [NAN] * unknown)[:, None]
    streak = Streak(3)
    for start in range(0, len(evidence), window):
        part = evidence[start : start + window]
        steps = np.arange(start, start + len(part))
        there = np.ones(part.shape, bool)
        streak.look(steps, np.zeros(1, int), hit=part > 0, present=there, evidence=part)
    assert streak.fired.tolist() == [0]
    assert streak.lasting.tolist() == [0] * lasts
