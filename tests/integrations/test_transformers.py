"""The Trainer in transformers and Accelerate, under an entry point and with the callback."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.results import Results

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers or accelerate is not installed",
)

PROGRAM = Path(__file__).with_name("transformers_program.py")
SHORT = ["plain", "accelerate", "resumed", "twice"]
LONG = ["accumulated", "bf16", "checkpointed", "accelerate bf16"]
WAYS = ["plain", *(pytest.param(way, marks=pytest.mark.slow) for way in LONG[:3])]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of the program."""
    return Results(PROGRAM, [SHORT, LONG], folder=tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("way", WAYS)
def test_a_traced_training_is_the_untraced_one(results: Results, way: str) -> None:
    assert results[way]["callback same"]
    assert results[way]["door same"]


@pytest.mark.parametrize("way", WAYS)
def test_the_callback_records_what_a_door_records(results: Results, way: str) -> None:
    door, callback = results[way]["door"], results[way]["callback"]
    for what in ("steps", "nodes", "edges", "gradients", "records"):
        assert callback[what] == door[what], what


@pytest.mark.parametrize(
    ("way", "steps", "half"),
    [
        ("plain", 8, 4),
        pytest.param("accumulated", 4, 2, marks=pytest.mark.slow),
        pytest.param("bf16", 8, 4, marks=pytest.mark.slow),
        pytest.param("checkpointed", 8, 4, marks=pytest.mark.slow),
    ],
)
def test_steps_are_steps_of_the_optimizer(
    results: Results, way: str, steps: int, half: int
) -> None:
    assert results[way]["steps"] == steps
    assert results[way]["door"]["steps"] == list(range(steps))
    evaluations = [step for step, kind in results[way]["door"]["records"] if kind == "eval"]
    assert evaluations == [half, steps]


@pytest.mark.parametrize("way", WAYS)
def test_every_block_has_its_gradient_and_its_place(results: Results, way: str) -> None:
    blocks = ["transformer.h.0", "transformer.h.1"]
    assert {*blocks, "lm_head", "transformer.wte"} <= set(results[way]["door"]["gradients"])
    assert ["lm_head", "GPT2LMHeadModel"] in results[way]["door"]["edges"]


def test_what_the_trainer_logs_and_was_told_is_kept(results: Results) -> None:
    found = results["plain"]["callback"]
    logged = {"trainer/loss", "trainer/eval_loss", "trainer/grad_norm", "trainer/learning_rate"}
    assert {"loss", *logged} <= set(found["kpis"])
    assert found["config"]["arguments"]["per_device_train_batch_size"] == 4
    assert found["config"]["model"]["n_layer"] == 2


@pytest.mark.parametrize(
    ("way", "steps"),
    [("accelerate", 3), pytest.param("accelerate bf16", 6, marks=pytest.mark.slow)],
)
def test_a_loop_with_accelerate(results: Results, way: str, steps: int) -> None:
    assert results[way]["same"]
    assert results[way]["run"]["steps"] == list(range(steps))
    assert {"0", "1", "2"} <= set(results[way]["run"]["gradients"])


def test_checkpoints_can_be_resumed_and_hold_nothing_of_ours(results: Results) -> None:
    assert results["resumed"]["goes on the same"]
    assert len(results["resumed"]["run"]["steps"]) == 4
    assert "TraceCallback" not in results["resumed"]["state"]


def test_every_training_is_a_run_even_after_one_that_failed(results: Results) -> None:
    assert results["twice"] == {"states": ["finished"] * 3, "steps": [1, 4, 4]}
