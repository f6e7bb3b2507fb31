"""A training run of the zoo, built from a seed and run for a few steps."""

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
"""Steps after which a standard program evaluates its model."""


@dataclass
class Program:
    """A training run that has been built.

    Attributes:
        models: the trained models; the modules of the first one are checked.
        optimizers: the optimizers of all models.
        step: runs a complete step, given its number, and returns its loss.
        plain_loss: whether backward is called only on a step's loss, so that this loss can be
            compared with the recorded one.
        unseen: paths of modules that run inside compiled code when traced, so they have no record.
        held: other objects that the program refers to and that tracing must not change.
        rounds_differently: whether recorded steps run different kernels than other steps.
        calls_before: largest number of calls to a module while the program was being built. These
            calls are part of the first record.
        spec: further keys of the spec with which the program is traced.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    step: Callable[[int], Tensor]
    plain_loss: bool = True
    unseen: frozenset[str] = field(default_factory=frozenset)
    calls_before: int = 0
    held: dict[str, Any] = field(default_factory=dict)
    rounds_differently: bool = False
    spec: dict[str, Any] = field(default_factory=dict)


def seed_everything(seed: int = 0) -> None:
    """Seed the generators of Python, NumPy and torch."""
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
    """Return a standard training run: loss, backward, step, and occasional evaluations.

    Args:
        model: the model; put into training mode.
        loss: draws a batch from the global generators and returns the model's loss on it.
        optimizer: class of the optimizer.
        evaluate: whether the model can be called in evaluation mode without gradients.
        options: options of the optimizer.
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
