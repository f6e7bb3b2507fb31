"""Trains with transformers' Trainer and with Accelerate, plainly and traced; prints JSON.

Arguments: a folder, and the cases to run.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import comgra_decl as comgra
from comgra_decl.integrations.transformers import TraceCallback
from tests.integrations.same import same, seeded, summary

ROOT = Path(sys.argv[1])
warnings.simplefilter("ignore")


def model() -> GPT2LMHeadModel:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 12}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def texts(count: int = 16) -> list[dict[str, torch.Tensor]]:
    rows = (torch.arange(count * 10).reshape(count, 10) * 7) % 31
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(*callbacks: TrainerCallback, **settings: Any) -> Trainer:
    defaults = {"num_train_epochs": 2, "eval_strategy": "epoch", "logging_steps": 1}
    arguments = TrainingArguments(
        output_dir=str(ROOT / "output"),
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **({"save_strategy": "no"} | defaults | settings),
    )
    data = {"train_dataset": texts(), "eval_dataset": texts(4)}
    return Trainer(model(), arguments, **data, callbacks=[*callbacks])


def numbers(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what was logged, without times."""
    return [
        {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
        for entry in log
    ]


def fit(*callbacks: TrainerCallback, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    t = trainer(*callbacks, **settings)
    t.train(resume_from_checkpoint=resume)
    return {
        "parameters": dict(t.model.state_dict()),
        "optimizer": t.optimizer.state_dict()["state"],
        "log": numbers(t.state.log_history),
        "step": t.state.global_step,
    }


def callback(name: str) -> TraceCallback:
    return TraceCallback("debug", root=ROOT, group="callback", name=name)


def block(name: str) -> AbstractContextManager[Any]:
    return comgra.trace("debug", root=ROOT, group="block", name=name)


def compared(name: str, **settings: Any) -> dict[str, Any]:
    plain = seeded(lambda: fit(**settings))
    called = seeded(lambda: fit(callback(name), **settings))
    inside = seeded(lambda: fit(**settings), block(name))
    return {
        "callback same": same(plain, called),
        "door same": same(plain, inside),
        "callback": summary(comgra.open_run(ROOT / "callback" / name)),
        "door": summary(comgra.open_run(ROOT / "block" / name)),
        "steps": plain[0]["step"],
    }


def accelerated(**settings: Any) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **settings)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    data = TensorDataset(torch.linspace(-1, 1, 96).reshape(24, 4), torch.arange(24) % 2)
    prepared = accelerator.prepare(network, optimizer, DataLoader(data, batch_size=4))
    network, optimizer, batches = prepared
    for inputs, targets in batches:
        with accelerator.accumulate(network):
            loss = torch.nn.functional.cross_entropy(network(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"parameters": dict(network.state_dict())}


def with_accelerate(name: str, **settings: Any) -> dict[str, Any]:
    plain = seeded(lambda: accelerated(**settings))
    inside = seeded(lambda: accelerated(**settings), block(name))
    return {
        "same": same(plain, inside),
        "run": summary(comgra.open_run(ROOT / "block" / name)),
    }


def resumed() -> dict[str, Any]:
    saved = {"save_strategy": "epoch", "save_total_limit": 1, "eval_strategy": "no"}
    first = fit(callback("first"), **saved, num_train_epochs=1)
    path = str(ROOT / "output" / f"checkpoint-{first['step']}")
    again = seeded(lambda: fit(resume=path, eval_strategy="no"))
    traced = seeded(lambda: fit(callback("second"), resume=path, eval_strategy="no"))
    return {
        "goes on the same": same(again, traced),
        "state": json.loads((Path(path) / "trainer_state.json").read_text())["stateful_callbacks"],
        "run": summary(comgra.open_run(ROOT / "callback" / "second")),
    }


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError("the training's own")


def twice() -> dict[str, Any]:
    one = TraceCallback("debug", root=ROOT, group="twice")
    with suppress(ValueError):
        fit(one, Stops())
    t = trainer(one, num_train_epochs=1)
    t.train()
    t.train()
    runs = [comgra.open_run(run.path) for run in comgra.list_runs(ROOT / "twice")]
    return {"states": [run.state for run in runs], "steps": [len(run.steps) for run in runs]}


if __name__ == "__main__":
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: compared("plain"),
        "accumulated": lambda: compared(
            "accumulated", gradient_accumulation_steps=2, max_grad_norm=0.1
        ),
        "bf16": lambda: compared("bf16", bf16=True),
        "checkpointed": lambda: compared("checkpointed", gradient_checkpointing=True),
        "accelerate": lambda: with_accelerate("accelerate", gradient_accumulation_steps=2),
        "accelerate bf16": lambda: with_accelerate("accelerate bf16", mixed_precision="bf16"),
        "resumed": resumed,
        "twice": twice,
    }
    results = {name: case() for name, case in cases.items() if name in sys.argv[2:]}
    sys.stdout.write(f"results {json.dumps(results)}\n")
