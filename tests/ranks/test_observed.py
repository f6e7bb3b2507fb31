"""Training in two processes whose recorded steps stay compiled: `compile: observed`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.ranks.launching import run_ranks
from tests.ranks.observing import STEPS, WAYS

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="variants cannot be kept apart")

ON_BOTH = [way for way in WAYS if "one rank" not in way and way != "talking"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found, for each way."""
    out = tmp_path_factory.mktemp("observed")
    for code, text in run_ranks("-m", "tests.ranks.observing", out):
        assert code == 0, text
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_train_as_untraced_and_record_what_the_uncompiled_program_holds(
    trained: list[dict[str, Any]], way: str
) -> None:
    for rank in trained:
        found = rank[way]
        assert found["faults"] == []
        assert found["losses"]
        assert found["steps"] == [*range(0, STEPS, 2)]
        assert all(found["equal"])


@pytest.mark.parametrize("way", ON_BOTH)
def test_all_ranks_compile_with_observers_once_and_other_steps_nothing_more(
    trained: list[dict[str, Any]], way: str
) -> None:
    for rank in trained:
        found = rank[way]
        assert found["warnings"] == []
        assert {"first.one", "first.two", "second.one"} <= {*found["shown"]}
        plain, observed = found["plain graphs"], found["graphs"][2]
        assert plain < observed
        assert found["graphs"] == [0, plain, *[observed] * (STEPS - 2)]


@pytest.mark.parametrize("way", ["DDP, refused on one rank", "sharded, refused on one rank"])
def test_a_rank_that_runs_eagerly_meets_those_that_run_compiled(
    trained: list[dict[str, Any]], way: str
) -> None:
    """Both communicate in the same order, so neither waits forever."""
    zero, one = (rank[way] for rank in trained)
    assert zero["warnings"] == []
    assert zero["shown"]
    assert "not on this rank" in one["warnings"][0]
    assert one["shown"] == []


def test_compiled_code_that_calls_collectives_itself_runs_eagerly_on_all_ranks(
    trained: list[dict[str, Any]],
) -> None:
    for rank in trained:
        assert "calls collectives itself" in rank["talking"]["warnings"][0]
        assert rank["talking"]["shown"] == []
