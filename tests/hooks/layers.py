"""Layers that call a torch function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

SOFTMAX = {"probs": {"select": {"function": "torch.softmax"}, "values": True}}


class Layer(nn.Module):
    """A layer that applies a function to the output of its linear map."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.linear(x))


def stack(compute: Callable[[torch.Tensor], torch.Tensor], *, depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Layer(compute) for _ in range(depth)))


def linear(model: nn.Sequential, index: int) -> nn.Linear:
    layer = model[index]
    assert isinstance(layer, Layer)
    return layer.linear


def softmaxed(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=1)
