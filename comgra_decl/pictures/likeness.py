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
    of_rows = [_hsic(k, k) for k in rows]
    of_columns = of_rows if second is None else [_hsic(k, k) for k in columns]
    found = np.full((len(rows), len(columns)), np.nan)
    for i, k in enumerate(rows):
        for j, other in enumerate(columns):
            scale = of_rows[i] * of_columns[j]
            if of_rows[i] > 0 and of_columns[j] > 0 and k.shape == other.shape:
                found[i, j] = _hsic(k, other) / np.sqrt(scale)
    return found


def _gram(values: NDArray[np.floating]) -> Floats:
    """Return the inner products of the samples, with zeros on the diagonal."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    flat = flat - flat.mean(0)  # changes nothing in theory, and saves digits
    gram: Floats = flat @ flat.T
    np.fill_diagonal(gram, 0.0)
    return gram


def _hsic(k: Floats, other: Floats) -> float:
    n = len(k)
    if n < FEWEST or k.shape != other.shape:
        return float("nan")
    product = (k * other).sum()
    sums = k.sum() * other.sum() / ((n - 1) * (n - 2))
    cross = 2 / (n - 2) * (k.sum(0) @ other.sum(0))
    return float((product + sums - cross) / (n * (n - 3)))
