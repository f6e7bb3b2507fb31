"""Examples of annotated programs; at module level, so that they can be pickled."""

from __future__ import annotations

import torch
from torch import nn

import comgra_decl as comgra


@comgra.node("doubled")
def double(x: torch.Tensor) -> torch.Tensor:
    """Doubles its input."""
    return 2 * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @comgra.node("net", kind="computed")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = comgra.node(self.linear(x), "hidden")
        return self.squash(double(hidden))

    @comgra.node("squashed", role="tanh")
    def squash(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@comgra.node("whole")
class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1
