"""Training in two processes whose recorded steps stay compiled: `compile: observed`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks.launching import run_ranks
from tests.ranks.observing import STEPS, WAYS

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="variants cannot be kept apart")

SHORT = [
    "DDP of a compiled model",
    "sharded, then compiled",
    "DDP, refused on one rank",
    "talking",
]
LONG = [way for way in WAYS if way not in SHORT]
Trained = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Returns what each rank has found for a way; ranks are started for all short or long ways."""

    @functools.cache
    def started(*ways: str) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("observed")
        for code, text in run_ranks("-m", "tests.ranks.observing", out, *ways):
            assert code == 0, text
        return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]

    def found(way: str) -> list[dict[str, Any]]:
        return [rank[way] for rank in started(*(SHORT if way in SHORT else LONG))]

    return found


def each(*ways: str) -> pytest.MarkDecorator:
    """Parametrises a test with ways; the long suite runs those that are not short."""
    marked = [pytest.param(w, marks=[pytest.mark.slow] * (w in LONG)) for w in ways]
    return pytest.mark.parametrize("way", marked)


@pytest.mark.slow
@each(*WAYS)
def test_ranks_train_as_untraced_and_record_what_the_uncompiled_program_holds(
    trained: Trained, way: str
) -> None:
    for found in trained(way):
        assert found["faults"] == []
        assert found["losses"]
        assert found["steps"] == [*range(0, STEPS, 2)]
        assert all(found["equal"])


@each(*(way for way in WAYS if "one rank" not in way and way != "talking"))
@pytest.mark.slow
def test_all_ranks_compile_with_observers_once_and_other_steps_nothing_more(
    trained: Trained, way: str
) -> None:
    for found in trained(way):
        assert found["warnings"] == []
        assert {"first.one", "first.two", "second.one"} <= {*found["shown"]}
        plain, observed = found["plain graphs"], found["graphs"][2]
        assert plain < observed
        assert found["graphs"] == [0, plain, *[observed] * (STEPS - 2)]


@each("DDP, refused on one rank", "sharded, refused on one rank")
@pytest.mark.slow
def test_a_rank_that_runs_eagerly_meets_those_that_run_compiled(trained: Trained, way: str) -> None:
    """Both communicate in the same order, so neither waits forever."""
    zero, one = trained(way)
    assert zero["warnings"] == []
    assert zero["shown"]
    assert "not on this rank" in one["warnings"][0]
    assert one["shown"] == []


@pytest.mark.slow
def test_compiled_code_that_calls_collectives_itself_runs_eagerly_on_all_ranks(
    trained: Trained,
) -> None:
    for found in trained("talking"):
        assert "calls collectives itself" in found["warnings"][0]
        assert found["shown"] == []
