"""For any small program, edges match the dataflow in its text, and gradients match autograd."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hooks.graph.programs import OPERATIONS, Line, Program
from tests.support.shortened import examples

_EVERYTHING = [Line("trace", index, 0) for index in range(28)]


@settings(max_examples=30)
@given(st.lists(st.builds(Line, st.sampled_from(OPERATIONS), st.integers(), st.integers())))
def test_edges_and_gradients_of_small_programs(lines: list[Line]) -> None:
    program = Program().run([*lines, *_EVERYTHING])
    assert program.found == program.expected


@settings(max_examples=examples(400))
@given(st.integers(min_value=0, max_value=2**32), st.integers(min_value=5, max_value=25))
def test_edges_and_gradients_of_random_programs(seed: int, length: int) -> None:
    chosen = random.Random(seed)
    lines = [
        Line(chosen.choice(OPERATIONS), chosen.randrange(30), chosen.randrange(30))
        for _ in range(length)
    ]
    program = Program().run([*lines, *_EVERYTHING])
    assert program.found == program.expected
