"""A softmax over the batch is detected behind the loss, wherever it is in the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from comgra_decl.records import BATCH_SOFTMAXES
from tests.support.recording import EVERYTHING, recording


class Net(nn.Module):
    """Applies a function between two layers, to a tensor [batch, 5, 6]."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 30), nn.Linear(30, 2)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.between(self.first(x).view(-1, 5, 6)).flatten(1))
        return out


def over_pairs(x: torch.Tensor) -> torch.Tensor:
    """A softmax over the similarities [batch, batch] between samples."""
    flat = x.flatten(1)
    return ((flat @ flat.T).softmax(0) @ flat).view_as(x)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (lambda x: x.softmax(0), [[4, 5, 6]]),
        (lambda x: x.softmax(-3), [[4, 5, 6]]),
        (lambda x: x.flatten(1).log_softmax(0).view_as(x), [[4, 30]]),
        (lambda x: x.softmax(1), []),
        (lambda x: x.softmax(-1), []),
        (lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1), []),  # over 5 positions
        (over_pairs, []),
        (torch.tanh, []),
    ],
)
def test_a_softmax_over_the_batch_is_found(
    between: Callable[[torch.Tensor], torch.Tensor], found: list[list[int]]
) -> None:
    model = Net(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
            optimizer.step()
    assert run.faults == []
    each = [step.info.extra.get(BATCH_SOFTMAXES, []) for step in run.steps]
    assert each == [found, found, [], []]  # the first records contain it
