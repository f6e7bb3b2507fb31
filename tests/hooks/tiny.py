"""A network with two layers, and one step of its training."""

from __future__ import annotations

import torch
from torch import nn


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 4) -> None:
    optimizer.zero_grad()
    model(torch.randn(batch, 3)).square().mean().backward()
    optimizer.step()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
