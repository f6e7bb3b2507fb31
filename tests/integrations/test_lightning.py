"""Lightning, unmodified under an entry point, and with the callback."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from comgra_decl.query import list_runs, open_run
from tests.integrations.results import Results
from tests.support.programs import python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)

PROGRAM = Path(__file__).with_name("lightning_program.py")
SHORT = ["plain", "adversaries", "resumed", "failed", "twice"]
LONG = ["distributed", "accumulated", "bf16", "stopped"]
WAYS = ["plain", "adversaries", *(pytest.param(way, marks=pytest.mark.slow) for way in LONG[1:])]

DISTRIBUTED = """
import hashlib
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        parts = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        self.net = torch.nn.Sequential(*parts)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    data = TensorDataset(torch.linspace(-1, 1, 96).reshape(24, 4), torch.arange(24) % 3)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    if trainer.is_global_zero:
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print("trained", hashlib.sha256(bits).hexdigest())
"""
"""Lightning itself starts the second process, with the same command line."""


LOGGED = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from comgra_decl.integrations.lightning import TraceCallback, TraceLogger


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


data = DataLoader(TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), batch_size=4)
trainer = Trainer(
    accelerator="cpu", max_epochs=2, log_every_n_steps=1, num_sanity_val_steps=0,
    logger=[TraceLogger(), CSVLogger(".", name="csv", version="it")], default_root_dir=".",
    callbacks=[TraceCallback("debug", root="runs", group="g", name="it")],
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), data, data)
TraceLogger().log_metrics({"late": 1.0}, 3)
"""
"""Logs to Lightning's own logger, too."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of the program."""
    return Results(PROGRAM, [SHORT, LONG], folder=tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("way", WAYS)
def test_a_traced_training_is_the_untraced_one(results: Results, way: str) -> None:
    assert results[way]["callback same"]
    assert results[way]["door same"]


@pytest.mark.parametrize("way", WAYS)
def test_the_callback_records_what_a_door_records(results: Results, way: str) -> None:
    door, callback = results[way]["door"], results[way]["callback"]
    for what in ("steps", "nodes", "edges", "gradients"):
        assert callback[what] == door[what], what
    assert [entry[:2] for entry in callback["records"]] == door["records"]


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ("plain", 12),
        pytest.param("accumulated", 6, marks=pytest.mark.slow),
        pytest.param("bf16", 12, marks=pytest.mark.slow),
    ],
)
def test_steps_are_steps_of_the_optimizer(results: Results, way: str, steps: int) -> None:
    assert results[way]["steps"] == steps
    recorded = results[way]["door"]["steps"]
    assert recorded[:6] == [0, 1, 2, 3, 4, 5]
    assert recorded[-1] == steps - 1


def test_a_step_of_two_optimizers_is_one_step(results: Results) -> None:
    assert results["adversaries"]["steps"] == 24
    assert results["adversaries"]["door"]["steps"][-1] == 11


def test_nodes_are_named_after_the_module(results: Results) -> None:
    nodes = results["plain"]["door"]["nodes"]
    assert {"net.0", "net.1", "net.2", "net.3"} <= set(nodes)
    assert {"net.0", "net.1", "net.3"} <= set(results["plain"]["door"]["gradients"])
    assert ["net.0", "net.1"] in results["plain"]["door"]["edges"]


def test_evaluations_have_their_names(results: Results) -> None:
    records = results["plain"]["callback"]["records"]
    found = [entry for entry in records if entry[1] == "eval"]
    assert [entry[0] for entry in found] == [0, 6, 12]
    assert [entry[2:] for entry in found] == [["sanity_check"], ["validation"], ["validation"]]
    assert results["twice"]["runs"][2]["records"] == [[0, "eval", "test"]]


def test_hyperparameters_are_kept_and_secrets_are_not(results: Results) -> None:
    config = results["plain"]["callback"]["config"]
    assert config["hyperparameters"] == {"width": 8, "api_key": "(not saved)"}
    assert config["trainer"]["accumulate_grad_batches"] == 1


def test_metrics_are_kept(results: Results) -> None:
    assert {"loss", "trainer/train_loss", "trainer/val_loss"} <= set(
        results["plain"]["callback"]["kpis"]
    )


@pytest.mark.slow
def test_what_a_module_logs_becomes_metrics(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(LOGGED)
    done = python(tmp_path, "train_it.py")
    assert done.returncode == 0, done.stderr
    truth = pd.read_csv(tmp_path / "csv" / "it" / "metrics.csv")
    table = open_run(tmp_path / "runs" / "g" / "it").kpis()
    for name in ("train_loss", "val_loss"):
        told, wanted = table[table["name"] == name], truth[truth[name].notna()]
        assert told["step"].tolist() == wanted["step"].tolist()
        assert told["value"].tolist() == pytest.approx(wanted[name].tolist(), rel=1e-6)
    assert "late" not in set(table["name"])
    ends: Any = truth.groupby("epoch").last()  # what the callback stores, once per epoch
    for name in ("train_loss", "val_loss"):
        stored = table.loc[table["name"] == f"trainer/{name}", "value"]
        assert stored.tolist() == pytest.approx(ends[name].tolist(), rel=1e-6)
    assert [*(tmp_path / "comgra").glob("*/checkpoints/*.ckpt")]


def test_checkpoints_are_the_same_and_can_be_resumed(results: Results) -> None:
    assert results["resumed"]["checkpoints"]
    assert results["resumed"]["goes on the same"]
    assert len(results["resumed"]["run"]["steps"]) == 6


def test_an_exception_of_the_training_ends_the_run(results: Results) -> None:
    assert results["failed"]["message"] == "the training's own"
    assert results["failed"]["state"] == "failed"
    assert results["failed"]["next"].endswith("failed-2")


@pytest.mark.slow
def test_the_ranks_of_a_distributed_training_are_one_run(results: Results) -> None:
    found = results["distributed"]
    assert found["same"]
    assert (found["ranks"], found["state"], found["alike"]) == ([0, 1], "finished", True)
    assert found["run"]["steps"] == [0, 1, 2]
    assert {"net.0", "net.1", "net.3"} <= set(found["run"]["gradients"])


@pytest.mark.slow
def test_processes_that_lightning_starts_itself_record_one_run(tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(DISTRIBUTED)
    plain = python(tmp_path, "train_it.py")
    traced = python(tmp_path, "train_it.py", env={"COMGRA": "debug"})
    trained = [
        [line for line in done.stdout.splitlines() if line.startswith("trained")]
        for done in (plain, traced)
    ]
    assert trained[0] == trained[1]
    assert len(trained[0]) == 1, plain.stderr
    (summary,) = list_runs(tmp_path / "runs")
    run = open_run(summary.path)
    assert (run.ranks, run.state, [*run.steps]) == ([0, 1], "finished", [0, 1, 2])
    assert run.rank_differences().empty


def test_every_fit_is_a_run(results: Results) -> None:
    runs = results["twice"]["runs"]
    assert results["twice"]["states"] == ["finished"] * 3
    assert [run["steps"] for run in runs] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], []]
