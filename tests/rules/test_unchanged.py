"""Outputs that stay the same although their inputs change, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from comgra_decl.rules.values.unchanged import UnchangedOutput
from tests.rules.tape import Tape

RNG = np.random.default_rng(9)
ONE_HOT = np.eye(6)[:4]


def chained(
    outputs: list[NDArray[np.float64]], *, held: bool = False, dtype: str = "float32"
) -> Tape:
    """An input that differs in each record unless it is held fixed, and what is derived from it."""
    tape = Tape()
    given = tape.slot("x", (4, 6), dtype=dtype)
    made = tape.slot("act", (4, 6), class_="Softmax")
    after = tape.slot("after", (4, 6))
    tape.graph([(given, made), (made, after)])
    still = RNG.normal(size=(4, 6))
    for output in outputs:
        tape.record(
            {given: still if held else RNG.normal(size=(4, 6)), made: output, after: output}
        )
    return tape


@pytest.mark.parametrize("window", [1, 4, 100])
def test_an_output_that_stays_where_its_input_changes_is_named(window: int) -> None:
    moving = [RNG.normal(size=(4, 6)) for _ in range(3)]
    (found,) = chained([*moving, *[np.ones((4, 6))] * 6]).findings(UnchangedOutput(), window=window)
    # the fourth record is the first with ones, the fifth the first that is as the one before;
    # what is computed from it stays, too, and is not to blame
    assert (str(found.place), found.first_step, found.also) == ("act", 4, 0)


@pytest.mark.parametrize(
    "tape",
    [
        chained([np.ones((4, 6))] * 5),  # four repetitions
        chained([np.ones((4, 6))] * 9, held=True),  # nothing has changed
        chained([np.ones((4, 6))] * 9, dtype="int64"),  # positions are counted from tokens
        chained([ONE_HOT[list(order)] for order in ([0, 1, 2, 3], [3, 1, 0, 2]) * 5]),
        chained([np.ones((4, 6)) * (1 + step % 2) for step in range(9)]),
    ],
    ids=["short", "held", "tokens", "one-hot", "alternating"],
)
def test_what_may_stay_or_does_not(tape: Tape) -> None:
    assert not tape.findings(UnchangedOutput())
