"""Synthetic data by seed, easy enough to learn in a hundred steps."""

from __future__ import annotations

import torch
from torch import Tensor

COUNT = 1152  # 128 of them are held out


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(
    seed: int, *, features: int = 20, classes: int = 4, far: float = 1.2
) -> tuple[Tensor, Tensor]:
    """Points around one centre per class."""
    g = _random(seed)
    centres = far * torch.randn(classes, features, generator=g)
    y = torch.randint(classes, (COUNT,), generator=g)
    return centres[y] + torch.randn(COUNT, features, generator=g), y


def rings(seed: int, *, features: int = 12, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Points classified by their distance from the origin, in two of the features."""
    g = _random(seed)
    y = torch.randint(classes, (COUNT,), generator=g)
    angle = 6.2832 * torch.rand(COUNT, generator=g)
    radius = (y + 0.5).float() * 2.4 / classes
    x = torch.randn(COUNT, features, generator=g)
    x[:, 0], x[:, 1] = radius * angle.cos(), radius * angle.sin()
    x[:, :2] += 0.08 * torch.randn(COUNT, 2, generator=g)
    return x, y


def teacher(seed: int, *, features: int = 16, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Outputs of a small random network, [n, 1]."""
    g = _random(seed)
    x = torch.randn(COUNT, features, generator=g)
    w = torch.randn(features, 8, generator=g) / features**0.5
    y = torch.tanh(2 * x @ w) @ torch.randn(8, 1, generator=g) / 2
    return x, y + noise * torch.randn(COUNT, 1, generator=g)


def waves(seed: int, *, features: int = 6) -> tuple[Tensor, Tensor]:
    """A sum of sines of the features, [n, 1]."""
    g = _random(seed)
    x = 2 * torch.rand(COUNT, features, generator=g) - 1
    y = torch.sin(2 * x).sum(1, keepdim=True) / 2 + x[:, :1] * x[:, 1:2]
    return x, y + 0.05 * torch.randn(COUNT, 1, generator=g)


def images(
    seed: int, *, size: int = 12, channels: int = 1, classes: int = 4
) -> tuple[Tensor, Tensor]:
    """Noisy stripes whose direction and width determine their class."""
    g = _random(seed)
    y = torch.randint(classes, (COUNT,), generator=g)
    line = torch.arange(size).float()
    phase = 6.2832 * torch.rand(COUNT, 1, 1, generator=g)
    turned = (y % 2 == 0)[:, None, None]
    grid = torch.where(turned, line[None, :, None], line[None, None, :])
    width = 1.0 + 0.8 * (y // 2).float()[:, None, None]
    picture = torch.sin(width * grid + phase).expand(COUNT, size, size)
    noise = 0.3 * torch.randn(COUNT, channels, size, size, generator=g)
    return picture[:, None] + noise, y


def sequences(
    seed: int, *, length: int = 10, features: int = 4, classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Sequences whose class is determined by the sum of their first feature."""
    g = _random(seed)
    x = torch.randn(COUNT, length, features, generator=g)
    total = x[:, :, 0].sum(1) / length**0.5
    edges = torch.quantile(total, torch.linspace(0, 1, classes + 1)[1:-1])
    return x, torch.bucketize(total, edges)


def tokens(
    seed: int, *, length: int = 12, count: int = 10, classes: int = 4
) -> tuple[Tensor, Tensor]:
    """Tokens whose class is the most frequent group of tokens."""
    g = _random(seed)
    y = torch.randint(classes, (COUNT,), generator=g)
    x = torch.randint(count, (COUNT, length), generator=g)
    known = torch.rand(COUNT, length, generator=g) < 0.4
    return torch.where(known, (y % count)[:, None], x), y


def text(seed: int, *, length: int = 16, count: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences in which the previous token mostly determines the next; targets are the next."""
    g = _random(seed)
    after = torch.randperm(count, generator=g)
    x = torch.zeros(COUNT, length + 1, dtype=torch.int64)
    x[:, 0] = torch.randint(count, (COUNT,), generator=g)
    for at in range(length):
        odd = torch.randint(count, (COUNT,), generator=g)
        usual = torch.rand(COUNT, generator=g) < 0.85
        x[:, at + 1] = torch.where(usual, after[x[:, at]], odd)
    return x[:, :-1], x[:, 1:]


def low_rank(seed: int, *, features: int = 24, rank: int = 5) -> tuple[Tensor, Tensor]:
    """Points on a low-dimensional plane, which are their own targets."""
    g = _random(seed)
    base = torch.randn(rank, features, generator=g) / rank**0.5
    x = torch.randn(COUNT, rank, generator=g) @ base + 0.05 * torch.randn(
        COUNT, features, generator=g
    )
    return x, x.clone()
