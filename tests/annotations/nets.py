"""A short training run, and the curves recorded from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.query import Run

SPARSE = {"nodes": {"all": {"select": "**"}}, "schedule": {"first": 2, "every": 500}}


class Net:
    """A network with 17 parameters, and its training loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.randn(2, 3)).square().mean()
        return loss

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def curve(run: Run, name: str = "loss") -> tuple[list[int], list[float]]:
    kpis = run.kpis()
    part = kpis[kpis["name"] == name]
    return part["step"].tolist(), part["value"].tolist()


def traced(tmp_path: Path, train: Callable[[], Any], **changes: Any) -> tuple[Run, Any]:
    with comgra.trace({**SPARSE, **changes}, root=tmp_path) as session:
        result = train()
    assert session.path is not None
    return comgra.open_run(session.path), result
