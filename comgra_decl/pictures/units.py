"""Facts about a layer: dead units, the spectrum of its weight, the loss's Grad-CAM, induction."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def dead_units(values: NDArray[np.floating], axis: int) -> NDArray[np.bool_]:
    """Return which units are at or below 0 at all positions in all samples, [units].

    Args:
        values: the output of an activation, [samples, ...].
        axis: the axis of the units.
    """
    over = tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    dead: NDArray[np.bool_] = np.less_equal(values, 0).all(over, keepdims=True).reshape(-1)
    return dead


def spectrum(weight: NDArray[np.floating]) -> Floats:
    """Return the singular values of a weight [outputs, ...], read as a matrix, largest first.

    NaN if the weight is not finite.
    """
    matrix = weight.reshape(len(weight), -1).astype(np.float64)
    if not np.isfinite(matrix).all():
        return np.full(min(matrix.shape), np.nan)
    singular: Floats = np.linalg.svd(matrix, compute_uv=False).astype(np.float64)
    return singular


def loss_cam(output: NDArray[np.floating], gradient: NDArray[np.floating]) -> Floats:
    """Return the Grad-CAM of the loss, [samples, ...], for a layer [samples, channels, ...].

    Negative values support a small loss. As in Selvaraju et al. (2017), without the final ReLU.
    """
    over = tuple(range(2, output.ndim))
    weights = gradient.astype(np.float64).mean(over, keepdims=True)
    cam: Floats = (weights * output.astype(np.float64)).sum(1)
    return cam


def induction(weights: NDArray[np.floating], tokens: NDArray[np.integer]) -> tuple[Floats, int]:
    """Return the induction score of each head, [heads], and the number of queries in it.

    An induction head looks for earlier occurrences of the current token and attends to the tokens
    that followed them. The score is the attention that a query at position t pays to all earlier
    positions s < t with tokens[s - 1] == tokens[t], as a mean over the queries that have such
    positions. It is the prefix matching score of Olsson et al. (2022), "In-context Learning and
    Induction Heads", for any sequence instead of repeated random tokens: 1 if all attention goes to
    these positions. A head that spreads its attention evenly over t + 1 positions scores about 1 /
    (t + 1) for each of them. NaN if no token is repeated.

    Args:
        weights: attention weights, [samples, heads, queries, keys], queries and keys at the same
            positions.
        tokens: [samples, positions].
    """
    length = tokens.shape[1]
    same = tokens[:, :, None] == tokens[:, None, :]  # [samples, query t, position s]
    follows = np.zeros_like(same)
    follows[:, :, 1:] = same[:, :, :-1]
    follows &= np.tri(length, k=-1, dtype=bool)
    counted = follows.any(2)
    count = int(counted.sum())
    if not count:
        return np.full(weights.shape[1], np.nan), 0
    paid = np.where(follows[:, None], weights.astype(np.float64), 0.0).sum(3)
    scores: Floats = (paid * counted[:, None]).sum((0, 2)) / count
    return scores, count
