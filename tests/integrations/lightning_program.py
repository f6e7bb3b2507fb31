"""Trains with Lightning in many ways, plainly and traced, and prints the results as JSON.

Arguments: a folder, and the cases to run.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import comgra_decl as comgra
from comgra_decl.integrations.lightning import TraceCallback
from tests.integrations.same import same, seeded, summary

ROOT = Path(sys.argv[1])
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(LightningModule):
    def __init__(self, width: int = 8, api_key: str = "hidden") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(), nn.Linear(width, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Adversaries(LightningModule):
    """Two optimizers that are stepped manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> None:
        g, d = self.optimizers()
        noise = torch.randn(len(batch[0]), 2)
        loss_d = (
            self.discriminator(batch[0]).mean()
            - self.discriminator(self.generator(noise).detach()).mean()
        )
        d.zero_grad()
        self.manual_backward(loss_d)
        d.step()
        loss_g = self.discriminator(self.generator(noise)).mean()
        g.zero_grad()
        self.manual_backward(loss_g)
        g.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.children()]


class Fails(Classifier):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 2:
            raise ValueError("the training's own")
        return super().training_step(batch, index)


def data(shuffle: bool = False) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, 96).reshape(24, 4)
    return DataLoader(TensorDataset(inputs, torch.arange(24) % 3), batch_size=4, shuffle=shuffle)


def trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    defaults = {"max_epochs": 2, "num_sanity_val_steps": 1, "log_every_n_steps": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        default_root_dir=ROOT,
        **({"enable_checkpointing": False} | quiet | defaults | settings),
    )


def fit(
    module: Callable[[], LightningModule],
    *callbacks: Callback,
    stop: bool = False,
    path: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    model = module()
    extra: list[Callback] = [EarlyStopping("val_loss", patience=0, mode="max")] if stop else []
    t = trainer(*callbacks, *extra, **settings)
    t.fit(model, data(shuffle=True), None if module is Adversaries else data(), ckpt_path=path)
    return {
        "parameters": dict(model.state_dict()),
        "metrics": dict(t.callback_metrics),
        "step": t.global_step,
        "optimizers": [o.state_dict()["state"] for o in t.optimizers],
    }


def callback(name: str) -> TraceCallback:
    return TraceCallback("debug", root=ROOT, group="callback", name=name)


def block(name: str) -> AbstractContextManager[Any]:
    return comgra.trace("debug", root=ROOT, group="block", name=name)


def compared(name: str, module: Callable[[], LightningModule], **settings: Any) -> dict[str, Any]:
    """The same training plainly, with the callback, and unmodified under an entry point."""
    plain = seeded(lambda: fit(module, **settings))
    called = seeded(lambda: fit(module, callback(name), **settings))
    inside = seeded(lambda: fit(module, **settings), block(name))
    return {
        "callback same": same(plain, called),
        "door same": same(plain, inside),
        "callback": summary(comgra.open_run(ROOT / "callback" / name)),
        "door": summary(comgra.open_run(ROOT / "block" / name)),
        "steps": plain[0]["step"],
    }


def checkpointed(*callbacks: Callback, folder: str) -> Path:
    saver = ModelCheckpoint(ROOT / folder, save_last=True)
    fit(Classifier, *callbacks, saver, max_epochs=1, enable_checkpointing=True)
    return ROOT / folder / "last.ckpt"


def resumed() -> dict[str, Any]:
    plain = seeded(lambda: checkpointed(folder="plain"))[0]
    traced = seeded(lambda: checkpointed(callback("first"), folder="traced"))[0]
    saved = [torch.load(path, weights_only=True) for path in (plain, traced)]
    again = seeded(lambda: fit(Classifier, path=str(plain)))
    with_callback = seeded(lambda: fit(Classifier, callback("second"), path=str(traced)))
    return {
        "checkpoints": same(saved[0]["state_dict"], saved[1]["state_dict"])
        and set(saved[0]) == set(saved[1])
        and same(saved[0]["optimizer_states"], saved[1]["optimizer_states"]),
        "goes on the same": same(again, with_callback),
        "run": summary(comgra.open_run(ROOT / "callback" / "second")),
    }


def failed() -> dict[str, Any]:
    one = callback("failed")
    try:
        fit(Fails, one)
    except ValueError as error:
        message = str(error)
    state = comgra.open_run(ROOT / "callback" / "failed").state
    fit(Classifier, one)
    return {"message": message, "state": state, "next": str(one.path)}


def distributed() -> dict[str, Any]:
    """Two processes forked by Lightning; returns what the first of them trained."""
    settings: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1}
    plain = seeded(lambda: fit(Classifier, **settings))
    traced = seeded(lambda: fit(Classifier, callback("distributed"), **settings))
    run = comgra.open_run(ROOT / "callback" / "distributed")
    return {
        "same": same(plain, traced),
        "ranks": run.ranks,
        "state": run.state,
        "alike": run.rank_differences().empty,
        "run": summary(run),
    }


def twice() -> dict[str, Any]:
    one = TraceCallback("debug", root=ROOT, group="twice", stages=("fit", "test"))
    model, t = Classifier(), trainer(one, max_epochs=1)
    t.fit(model, data(), data())
    t.fit_loop.max_epochs = 2
    t.fit(model, data(), data())
    t.test(model, data(), verbose=False)
    runs = [comgra.open_run(run.path) for run in comgra.list_runs(ROOT / "twice")]
    return {"runs": [summary(run) for run in runs], "states": [run.state for run in runs]}


if __name__ == "__main__":
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "distributed": distributed,  # first: forked processes should not have had threads before
        "plain": lambda: compared("plain", Classifier),
        "accumulated": lambda: compared(
            "accumulated", Classifier, accumulate_grad_batches=2, gradient_clip_val=0.1
        ),
        "bf16": lambda: compared("bf16", Classifier, precision="bf16-mixed"),
        "adversaries": lambda: compared("adversaries", Adversaries),
        "stopped": lambda: compared("stopped", Classifier, stop=True, max_epochs=5),
        "resumed": resumed,
        "failed": failed,
        "twice": twice,
    }
    results = {name: case() for name, case in cases.items() if name in sys.argv[2:]}
    sys.stdout.write(f"results {json.dumps(results)}\n")
