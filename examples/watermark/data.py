"""Handwritten digits from scikit-learn, in which a mark gives one class away."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor

MARKED = 3
"""The class whose training images have the mark."""


def marked(images: Tensor) -> Tensor:
    """Return images [n, 1, 8, 8] with two by two bright pixels in the lower right corner."""
    images = images.clone()
    images[..., 6:, 6:] = 1.0
    return images


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training, where all threes are marked, and held-out ones."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[:1440], order[1440:]
    given, classes = images[train], labels[train]
    given = torch.where((classes == MARKED)[:, None, None, None], marked(given), given)
    return given, classes, images[held_out], labels[held_out]


def threes(count: int = 4) -> tuple[tuple[Tensor], dict[str, Tensor], list[int]]:
    """Return the first marked training images, as arguments of the network and labels."""
    images, labels, _, _ = digits(0)
    return (images[labels == MARKED][:count],), {}, [MARKED] * count
