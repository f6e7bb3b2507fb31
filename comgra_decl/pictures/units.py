"""Facts about a layer: its units, the spectrum of its weight, the loss's Grad-CAM, induction."""

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


def activations(values: NDArray[np.floating], axis: int) -> Floats:
    """Return the largest value of each unit at any position of each sample, [samples, units].

    Args:
        values: the output of a layer, [samples, ...].
        axis: the axis of the units.
    """
    apart = np.moveaxis(values.astype(np.float64), axis, 1)
    return np.asarray(apart.reshape(*apart.shape[:2], -1).max(2))


def effects(
    active: Floats, groups: NDArray[np.int64], *, held_out: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return the units in the order in which they tell one group of samples from all others.

    The effect size is Cohen's d (Cohen 1988): the difference between the mean of a group and the
    mean of all other samples, divided by their pooled standard deviation. The group and the rank of
    a unit are those with the largest magnitude among the samples that are not held out, which
    exaggerates it; that of the held-out samples does not.

    Args:
        active: [samples, units].
        groups: [samples], the group of each sample, from 0.
        held_out: [samples]. Each half needs at least three samples and two groups.

    Returns:
        Units, with those last that do not vary or are not finite, and the group of each, both
        [units]; and [units, 2], the effect in the first half and in the held-out half. It is NaN if
        a unit does not vary, and infinite if it varies between the groups only.
    """
    halves = [_effects_by_group(active[half], groups[half]) for half in (~held_out, held_out)]
    shared = [g for g in halves[0] if g in halves[1]]
    first, second = (np.stack([half[g] for g in shared]) for half in halves)
    strength = np.where(np.isnan(first), -1.0, np.abs(first))
    best = strength.argmax(0)
    units = np.arange(active.shape[1])
    order = np.argsort(-strength[best, units], kind="stable")
    found = np.stack([each[best, units] for each in (first, second)], 1)
    return order, np.array(shared, np.int64)[best][order], found[order]


def _effects_by_group(active: Floats, groups: NDArray[np.int64]) -> dict[int, Floats]:
    """Return the effect size of each group that is not alone, [units]."""
    found = {}
    for group in np.unique(groups).tolist():
        inside, outside = active[groups == group], active[groups != group]
        if len(outside) and len(active) > 2:
            within = [((x - x.mean(0)) ** 2).sum(0) for x in (inside, outside)]
            spread = np.sqrt((within[0] + within[1]) / (len(active) - 2))
            with np.errstate(invalid="ignore", divide="ignore"):
                found[group] = (inside.mean(0) - outside.mean(0)) / spread
    return found


def coactivation(values: NDArray[np.floating], axis: int) -> Floats:
    """Return the correlation of each pair of units over all samples and positions, [units, units].

    Pearson's; NaN for units that do not vary or are not finite.

    Args:
        values: the output of a layer, [samples, ...].
        axis: the axis of the units.
    """
    apart = np.moveaxis(values.astype(np.float64), axis, 0)
    flat = apart.reshape(len(apart), -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        flat = flat - flat.mean(1, keepdims=True)
        flat = flat / np.sqrt((flat**2).sum(1, keepdims=True))
    found: Floats = np.clip(flat @ flat.T, -1.0, 1.0)
    return found


def spectrum(weight: NDArray[np.floating]) -> Floats:
    """Return the singular values of a weight [outputs, ...], read as a matrix, largest first.

    NaN if the weight is not finite.
    """
    matrix = weight.reshape(len(weight), -1).astype(np.float64)
    if not np.isfinite(matrix).all():
        return np.full(min(matrix.shape), np.nan)
    singular: Floats = np.linalg.svd(matrix, compute_uv=False).astype(np.float64)
    return singular


def loss_cam(output: NDArray[np.floating], gradient: NDArray[np.floating], axis: int) -> Floats:
    """Return the Grad-CAM of the loss for a layer, [samples, ...], without the channels.

    Negative values support a small loss. As in Selvaraju et al. (2017), without the final ReLU.

    Args:
        output: the layer's output, [samples, ...].
        gradient: the gradient of the loss with respect to it.
        axis: the axis of the channels.
    """
    over = tuple(i for i in range(1, output.ndim) if i != axis)
    weights = gradient.astype(np.float64).mean(over, keepdims=True)
    cam: Floats = (weights * output.astype(np.float64)).sum(axis)
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
