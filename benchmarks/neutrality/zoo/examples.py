"""The repository's three examples, with the models, batches and losses of their scripts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual

NAMES = ["tutorial", "digits", "characters"]
_FOLDER = Path(__file__).parents[3] / "examples"


def build(name: str) -> Program:
    """Return the training of an example; only one per process, as all modules are named `train`."""
    folder = _FOLDER / name
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    script, cfg = importlib.import_module("train"), OmegaConf.load(folder / "conf/config.yaml")
    return {"tutorial": _tutorial, "digits": _digits, "characters": _characters}[name](script, cfg)


def _tutorial(script: Any, cfg: Any) -> Program:
    generator, criterion = torch.Generator().manual_seed(cfg.seed), nn.BCELoss(reduction="none")

    def loss(model: nn.Module) -> Tensor:
        inputs, targets = script.make_batch(cfg.batch_size, 5, generator)
        return criterion(model(inputs), targets).mean()

    return usual(script.RunningSum(**cfg.model), loss, optimizer=torch.optim.Adam, lr=cfg.lr)


def _digits(script: Any, cfg: Any) -> Program:
    loader, _ = script.load_data(cfg)
    batches = script.forever(loader)

    def loss(model: nn.Module) -> Tensor:
        images, labels = next(batches)
        return F.cross_entropy(model(images), labels)

    return usual(script.ConvNet(**cfg.model), loss, optimizer=torch.optim.Adam, lr=cfg.lr)


def _characters(script: Any, cfg: Any) -> Program:
    generator = torch.Generator().manual_seed(cfg.seed)
    text = script.read_text(None)
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([number[character] for character in text[:20_000]])
    model = script.GPT(len(number), **cfg.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)

    def step(_: int) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = script.loss_of(model, *script.get_batch(data, cfg, generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        return loss.detach()

    return Program([model], [optimizer], step)
