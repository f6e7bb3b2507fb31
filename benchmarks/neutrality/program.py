"""A training of the zoo: what is built from a seed and then taken through a few steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STEPS = 10
EVALUATED = (3, 9)
"""After these steps a program of the usual kind evaluates its model."""


@dataclass
class Program:
    """A training under way.

    Attributes:
        models: what is trained; the first is the one whose modules are looked at.
        optimizers: of all models.
        step: does one whole step, given its number, and returns its loss.
        plain_loss: whether the loss of a step is the only tensor that backward is called on, so
            that it can be compared with the recorded one.
        unseen: paths of modules that run inside compiled code when traced, so have no record.
        held: whatever else the program keeps, of which nothing may change.
        rounds_differently: whether recorded steps run other kernels than the rest.
        calls_before: calls of modules while the program was built, at most; they are part of the
            first record.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    step: Callable[[int], Tensor]
    plain_loss: bool = True
    unseen: frozenset[str] = field(default_factory=frozenset)
    calls_before: int = 0
    held: dict[str, Any] = field(default_factory=dict)
    rounds_differently: bool = False


def seed_everything(seed: int = 0) -> None:
    """Seeds the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def usual(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    evaluate: bool = True,
    **options: Any,
) -> Program:
    """Returns the training that most scripts do: loss, backward, step; an evaluation now and then.

    Args:
        model: in training mode from here on.
        loss: draws a batch from the global generators and returns the loss of the model on it.
        optimizer: its class.
        evaluate: whether the model can be called in evaluation mode without gradients.
        options: of the optimizer.
    """
    model.train()
    updates = optimizer(model.parameters(), **{"lr": 1e-3, **options})

    def step(number: int) -> Tensor:
        updates.zero_grad()
        value = loss(model)
        value.backward()
        updates.step()
        if evaluate and number in EVALUATED:
            model.eval()
            with torch.no_grad():
                loss(model)
            model.train()
        return value.detach()

    return Program([model], [updates], step)
