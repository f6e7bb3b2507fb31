"""Lightning, unmodified inside of a door and with the callback."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.programs import python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)

PROGRAM = Path(__file__).with_name("lightning_program.py")
REPOSITORY = PROGRAM.parents[2]
WAYS = ["plain", "accumulated", "bf16", "adversaries", "stopped"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program says; one process for all tests, as importing Lightning takes its time."""
    folder = tmp_path_factory.mktemp("lightning")
    path = {"PYTHONPATH": str(REPOSITORY)}
    done = python(folder, str(PROGRAM), str(folder), env=path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("results ")]
    found: dict[str, Any] = json.loads(line.removeprefix("results "))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_traced_training_is_the_untraced_one(results: dict[str, Any], way: str) -> None:
    assert results[way]["callback same"]
    assert results[way]["door same"]


@pytest.mark.parametrize("way", WAYS)
def test_the_callback_records_what_a_door_records(results: dict[str, Any], way: str) -> None:
    door, callback = results[way]["door"], results[way]["callback"]
    for what in ("steps", "nodes", "edges", "gradients"):
        assert callback[what] == door[what], what
    assert [entry[:2] for entry in callback["records"]] == door["records"]


@pytest.mark.parametrize(("way", "steps"), [("plain", 12), ("accumulated", 6), ("bf16", 12)])
def test_steps_are_steps_of_the_optimizer(results: dict[str, Any], way: str, steps: int) -> None:
    assert results[way]["steps"] == steps
    recorded = results[way]["door"]["steps"]
    assert recorded[:6] == [0, 1, 2, 3, 4, 5]
    assert recorded[-1] == steps - 1


def test_a_step_of_two_optimizers_is_one_step(results: dict[str, Any]) -> None:
    assert results["adversaries"]["steps"] == 24
    assert results["adversaries"]["door"]["steps"][-1] == 11


def test_nodes_are_named_after_the_module(results: dict[str, Any]) -> None:
    nodes = results["plain"]["door"]["nodes"]
    assert {"net.0", "net.1", "net.2", "net.3"} <= set(nodes)
    assert {"net.0", "net.1", "net.3"} <= set(results["plain"]["door"]["gradients"])
    assert ["net.0", "net.1"] in results["plain"]["door"]["edges"]


def test_evaluations_have_their_names(results: dict[str, Any]) -> None:
    records = results["plain"]["callback"]["records"]
    found = [entry for entry in records if entry[1] == "eval"]
    assert [entry[0] for entry in found] == [0, 6, 12]
    assert [entry[2:] for entry in found] == [["sanity_check"], ["validation"], ["validation"]]
    assert results["twice"]["runs"][2]["records"] == [[0, "eval", "test"]]


def test_hyperparameters_are_kept_and_secrets_are_not(results: dict[str, Any]) -> None:
    config = results["plain"]["callback"]["config"]
    assert config["hyperparameters"] == {"width": 8, "api_key": "(not saved)"}
    assert results["accumulated"]["callback"]["config"]["trainer"]["accumulate_grad_batches"] == 2


def test_metrics_are_kept(results: dict[str, Any]) -> None:
    assert {"loss", "trainer/train_loss", "trainer/val_loss"} <= set(
        results["plain"]["callback"]["kpis"]
    )


def test_checkpoints_are_the_same_and_can_be_resumed(results: dict[str, Any]) -> None:
    assert results["resumed"]["checkpoints"]
    assert results["resumed"]["goes on the same"]
    assert len(results["resumed"]["run"]["steps"]) == 6


def test_an_exception_of_the_training_ends_the_run(results: dict[str, Any]) -> None:
    assert results["failed"]["message"] == "the training's own"
    assert results["failed"]["state"] == "finished"
    assert results["failed"]["next"].endswith("failed-2")


def test_every_fit_is_a_run(results: dict[str, Any]) -> None:
    runs = results["twice"]["runs"]
    assert results["twice"]["states"] == ["finished"] * 3
    assert [run["steps"] for run in runs] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], []]
