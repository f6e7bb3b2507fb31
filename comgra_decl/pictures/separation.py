"""How far a cloud of samples has collapsed, and how far its categories are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]

_ROUNDING = 1e-10
"""Singular values below this share of the largest one are 0, except for rounding errors."""


def variability_collapse(points: Floats, groups: Groups) -> float:
    """Return the variation within the groups, relative to that between their means.

    tr(W pinv(B)) / C, where W is the covariance of the points around the means of their groups, B
    that of the C means around their own mean: NC1 of Papyan, Han and Donoho (2020), "Prevalence of
    neural collapse during the terminal phase of deep learning training". 0 if each group has
    collapsed to a point. NaN with fewer than two groups, or if all means are equal.

    Args:
        points: [samples, features].
        groups: [samples], the group of each sample.
    """
    names, place = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        return float("nan")
    means = np.stack([points[place == i].mean(0) for i in range(len(names))])
    _, singular, rows = np.linalg.svd(means - means.mean(0), full_matrices=False)
    kept = singular > _ROUNDING * max(singular[0], np.abs(means).max())
    if not kept.any():
        return float("nan")
    between = singular[kept] ** 2 / len(names)
    within = ((points - means[place]) @ rows[kept].T) ** 2
    return float((within.mean(0) / between).sum() / len(names))


def silhouette(points: Floats, groups: Groups) -> float:
    """Return the mean silhouette of the points (Rousseeuw 1987), from -1 to 1.

    (b - a) / max(a, b) for the mean Euclidean distance a of a point to the others of its group, and
    b to those of the nearest other group; 0 for the only point of a group. NaN with fewer than two
    groups, or if all groups are single points.

    Args:
        points: [samples, features].
        groups: [samples], the group of each sample.
    """
    names, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if not 2 <= len(names) < len(points):
        return float("nan")
    points = points - points.mean(0)  # saves digits
    squares = (points**2).sum(1)
    apart = squares[:, None] + squares - 2 * points @ points.T
    distances = np.sqrt(np.maximum(apart, 0))
    np.fill_diagonal(distances, 0.0)
    to = np.stack([distances[:, place == i].sum(1) for i in range(len(names))], 1)
    samples = np.arange(len(points))
    own = to[samples, place] / np.maximum(counts[place] - 1, 1)
    others = to / counts
    others[samples, place] = np.inf
    nearest = others.min(1)
    largest = np.maximum(own, nearest)
    with np.errstate(invalid="ignore"):
        shares = np.where(largest > 0, (nearest - own) / largest, 0.0)
    return float(np.where(counts[place] > 1, shares, 0.0).mean())


def effective_rank(points: Floats) -> float:
    """Return how many directions a cloud extends in, from 1 to the smaller of its dimensions.

    The exponential of the entropy of the singular values, as shares of their sum, after subtraction
    of the mean (Roy and Vetterli 2007, "The effective rank"). 0 if all points are equal.

    Args:
        points: [samples, features].
    """
    centred = points - points.mean(0)
    singular = np.linalg.svd(centred, compute_uv=False)
    if not singular.size or singular[0] <= _ROUNDING * np.abs(points).max(initial=0.0):
        return 0.0
    shares = singular[singular > 0] / singular.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))
