"""Small programs whose calls and losses reveal a mistake, or do not, and what rules report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from comgra_decl.rules import Finding, Rule
from tests.rules.tape import Tape
from tests.support.recording import EVERYTHING, recording

BATCH = 6

Tensor = torch.Tensor


class Around(nn.Module):
    """Applies a function between two layers, to a tensor [batch, *shape]; returns [batch, 2]."""

    def __init__(self, between: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.first = nn.Linear(3, torch.Size(shape).numel())
        self.last = nn.LazyLinear(2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x).view(len(x), *self.shape)
        out: Tensor = self.last(self.between(inner).reshape(len(x), -1))
        return out


def train(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], steps: int = 3) -> None:
    """Takes steps of SGD with a loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def train_around(between: Callable[[Tensor], Tensor], *shape: int) -> None:
    """Trains a model with a function inside it."""
    model = Around(between, *shape)
    model(torch.randn(BATCH, 3))  # sets the size of the last layer
    train(model, lambda net: net(torch.randn(BATCH, 3)).square().sum())


def findings(rule: Rule, program: Callable[[], None]) -> list[Finding]:
    """Returns what a rule finds in the facts and graphs of a recorded program."""
    torch.manual_seed(0)
    with recording(EVERYTHING) as run:
        program()
    assert run.faults == []
    tape = Tape(slots=sorted(run.slots.values(), key=lambda info: info.id))
    tape.structure = run.structures[-1] if run.structures else None
    tape.documents = {k: v for step in run.steps for k, v in step.documents.items()}
    for step in run.steps:
        tape.record({}, step=step.info.step, facts=step.info.extra)
    return tape.findings(rule)
