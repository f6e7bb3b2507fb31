"""Small networks and data for the different ways of training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Three layers, with mode-dependent and random operations in between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.relu(self.norm(self.stem(x)), inplace=True))
        result: torch.Tensor = self.head(hidden)
        return result


def batches(count: int, *, size: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields `count` batches of inputs and classes from the global generator."""
    for _ in range(count):
        yield torch.randn(size, 6), torch.randint(3, (size,))
