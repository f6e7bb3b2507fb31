"""Short training runs on generated data, recorded completely and diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from comgra_decl.rules import Finding, diagnose
from tests.support.traced import traced

NODES = {
    "all": {
        "select": "**",
        "capture": ["output", "output_grad", "parameter", "parameter_grad"],
    }
}
BATCH = 16

Loss = Callable[[nn.Module], torch.Tensor]
"""Draws a batch and returns a model's loss."""


def mlp(features: int, hidden: int, out: int, *end: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, out), *end)


def fit(
    model: nn.Module,
    loss_of: Loss,
    *,
    steps: int = 20,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Trains a model with Adam or another optimizer; `after` is called after each step."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        after()


def regression(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """A loss that compares predictions with numbers [16]."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(BATCH, 4)
        y = x.sum(1)
        return form(model(x), y)

    return loss_of


def classification(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """A loss that compares predictions with two classes [16]."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(BATCH, 4)
        y = (x[:, 0] > 0).long()
        return form(model(x), y)

    return loss_of


def found(root: Path, training: Callable[[], object]) -> list[Finding]:
    """Returns what all rules find in a training run, best first."""
    torch.manual_seed(0)
    return diagnose(traced(root, NODES, training)).findings


def alarms(findings: list[Finding]) -> list[str]:
    """Returns the findings above the severity of a hint."""
    return [f"{f.severity} {f.rule}: {f.message}" for f in findings if f.severity != "hint"]


def by_rule(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.rule: finding for finding in findings}
