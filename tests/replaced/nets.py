"""Networks and training loops that demonstrate comgra's features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ALL = {"all": {"select": "**", "capture": ["output", "output_grad"], "values": True}}

WEIGHTS = {"weights": {"select": "**", "capture": ["parameter", "parameter_grad"]}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class Net(nn.Module):
    """Two blocks of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A cell that is called once per token."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.memory(torch.cat([x[:, t], state], 1)))
        return state


def classify(model: nn.Module, *, steps: int = 1, batch: int = 5) -> None:
    """A plain loop that knows nothing about tracing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(batch, 4)), torch.randint(3, (batch,))).backward()
        optimizer.step()


def told(steps: int, say: Callable[[int], Any] | None = None) -> Callable[[], None]:
    """A function that trains, and adds annotations before each step."""

    def training() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            if say is not None:
                say(step)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    return training
