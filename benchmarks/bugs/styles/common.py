"""What the training runs share: small networks, data, and one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Reached(NamedTuple):
    """What a training run reached: a quality (larger is better), and the lowest acceptable one."""

    quality: float
    least: float

    @property
    def learned(self) -> bool:
        """Whether the training run reached the required quality."""
        return self.quality >= self.least


Training = Callable[[], Reached]


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activation functions between them."""
    layers: list[nn.Module] = []
    for index, (a, b) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(a, b)]
        if index < len(sizes) - 2:
            layers += [act()]
    return nn.Sequential(*layers)


def update(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> float:
    """Take an optimizer step and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(
            [p for group in optimizer.param_groups for p in group["params"]], clip
        )
    optimizer.step()
    return float(loss.detach())


def adam(model: nn.Module | Iterable[nn.Parameter], rate: float = 1e-3) -> torch.optim.Adam:
    """Return an Adam optimizer for a model or for parameters."""
    return torch.optim.Adam(model.parameters() if isinstance(model, nn.Module) else model, lr=rate)


def blobs(count: int, *, features: int = 12, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return points [count, features] around one centre per class, and the classes [count]."""
    labels = torch.randint(classes, (count,))
    centers = torch.randn(classes, features, generator=torch.Generator().manual_seed(5)) * 1.2
    return centers[labels] + torch.randn(count, features), labels


def pictures(count: int, *, side: int = 12, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return noisy pictures [count, 1, side, side] of one pattern per class, and the classes."""
    labels = torch.randint(classes, (count,))
    random = torch.Generator().manual_seed(6)
    patterns = F.interpolate(torch.rand(classes, 1, 4, 4, generator=random), size=(side, side))
    return patterns[labels] + 0.3 * torch.randn(count, 1, side, side), labels


def moons(count: int) -> Tensor:
    """Return points [count, 2] of two interleaved half circles."""
    angle, upper = torch.pi * torch.rand(count), torch.rand(count) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.06 * torch.randn(count, 2)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of correct answers."""
    return float((logits.argmax(-1) == labels).float().mean())


def explained(prediction: Tensor, target: Tensor) -> float:
    """Return the share of the targets' variance that the predictions explain."""
    return float(1 - F.mse_loss(prediction, target) / target.var())
