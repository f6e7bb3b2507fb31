from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, nearest, previous, resolve

HOSTILE = ["../../etc/passwd", "<script>alert(1)</script>", "9" * 400, "-1", "", "²", "\x00"]


def test_everything_that_exists_is_kept(view: RunView) -> None:
    wanted = Selection("eval", 10, "cell", "output", 2, "grad", "3", "l2")
    assert resolve(view, wanted, {}) == wanted


@pytest.mark.parametrize("text", HOSTILE)
def test_what_does_not_exist_gives_way_to_what_does(view: RunView, text: str) -> None:
    wanted = Selection(text, 10**15, text, text, 10**15, text, text, text)
    at = resolve(view, wanted, {})
    assert at.type == ""
    assert at.step == 11
    assert at.node in view.nodes
    assert at.role in view.roles(at.node)
    assert (at.gradient, at.batch, at.statistic) == ("grad", "mean", "std")


def test_the_step_is_the_nearest_of_the_chosen_type(view: RunView) -> None:
    assert resolve(view, Selection(type="eval", step=4), {}).step == 10
    assert resolve(view, Selection(step=None), {}).step == 11


def test_a_node_remembers_its_role(view: RunView) -> None:
    at = resolve(view, Selection(node="head", role=""), {"head": "weight"})
    assert at.role == "weight"
    other = resolve(view, Selection(node="embed", role=at.role), {})
    assert other.role == "weight"  # kept, as embed has a weight too
    assert resolve(view, Selection(node="Transformer", role="weight"), {}).role == "output"


def test_the_iteration_stays_as_near_as_possible(view: RunView) -> None:
    assert view.iterations("cell", "output") == [0, 1, 2]
    assert resolve(view, Selection(node="cell", iteration=7), {}).iteration == 2
    assert resolve(view, Selection(node="head", iteration=2), {}).iteration == 0


def test_outputs_come_before_parameters(view: RunView) -> None:
    assert view.roles("head") == ["output", "weight"]


def test_training_alone_is_not_offered_twice(view: RunView) -> None:
    assert view.types() == ["", "eval"]


@given(
    st.lists(st.integers(0, 10**6), min_size=1, unique=True).map(sorted),
    st.integers(0, 2 * 10**6),
)
def test_nearest_step(steps: list[int], wanted: int) -> None:
    found = nearest(np.array(steps), wanted)
    assert found in steps
    assert abs(found - wanted) == min(abs(step - wanted) for step in steps)


def test_the_step_before(view: RunView) -> None:
    assert previous(view.steps(""), 5) == 4
    assert previous(view.steps(""), 0) is None
    assert nearest(np.array([], np.int64), 3) is None
