"""The similarity of two representations of the same samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEWEST = 4
"""The unbiased estimate needs at least this many samples."""


def cka(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Return the linear centred kernel alignment of two representations, [samples, ...] each.

    See Kornblith et al. (2019), with the unbiased HSIC estimator by Song et al. (2012). The biased
    estimator is close to 1 for any two representations of only a few samples. NaN for fewer than
    four samples, and if a representation does not vary.
    """
    return float(cka_matrix([first], [second])[0, 0])


def cka_matrix(
    first: list[NDArray[np.floating]], second: list[NDArray[np.floating]] | None = None
) -> Floats:
    """Return the CKA of each representation in `first` and each in `second`, or in `first`."""
    rows = [_gram(each) for each in first]
    columns = rows if second is None else [_gram(each) for each in second]
    found = np.full((len(rows), len(columns)), np.nan)
    for n in {len(k) for k in rows} & {len(k) for k in columns}:
        if n >= FEWEST:
            at = [i for i, k in enumerate(rows) if len(k) == n]
            across = [j for j, k in enumerate(columns) if len(k) == n]
            found[np.ix_(at, across)] = _alignments(
                np.stack([rows[i] for i in at]), np.stack([columns[j] for j in across])
            )
    return found


def _alignments(k: Floats, other: Floats) -> Floats:
    """Return the CKA of Gram matrices [a, n, n] and [b, n, n]; NaN where one does not vary."""
    own = [np.array([_hsic(g[None], g[None])[0, 0] for g in grams]) for grams in (k, other)]
    scale = np.outer(*[np.where(each > 0, each, np.nan) for each in own])
    return np.asarray(_hsic(k, other) / np.sqrt(scale))


def _gram(values: NDArray[np.floating]) -> Floats:
    """Return the inner products of the samples, with zeros on the diagonal."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    flat = flat - flat.mean(0)  # changes nothing in theory, and saves digits
    gram: Floats = flat @ flat.T
    np.fill_diagonal(gram, 0.0)
    return gram


def _hsic(k: Floats, other: Floats) -> Floats:
    """Return the unbiased estimates [a, b] for Gram matrices [a, n, n] and [b, n, n]."""
    n = k.shape[-1]
    products = k.reshape(len(k), -1) @ other.reshape(len(other), -1).T
    sums = np.outer(k.sum((1, 2)), other.sum((1, 2))) / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (k.sum(1) @ other.sum(1).T)
    return np.asarray((products + sums - cross) / (n * (n - 3)))
