"""Modules made from a function, and their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ALL = {"all": {"select": "**", "capture": ["output", "output_grad"], "values": True}}

EVERYTHING = {
    "all": {
        "select": "**",
        "capture": ["output", "output_grad", "parameter", "parameter_grad"],
        "values": True,
    }
}


class Made(nn.Module):
    """A module whose forward pass is injected."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._made = forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._made(self, *inputs)


def losses_of(model: Callable[[torch.Tensor], torch.Tensor], *, steps: int = 8) -> list[float]:
    """Trains on fixed data with dropout and Adam; returns the losses."""
    torch.manual_seed(1)
    assert isinstance(model, nn.Module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
