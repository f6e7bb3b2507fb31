"""Mean, spread and largest magnitude of tensors that have too many samples to keep one row each.

One row of raw sums takes 64 bytes, so 16 million samples would take a gigabyte for three numbers
per statistic. Beyond `MOST_ROWS` samples, only the first `KEPT` samples have a row each. All
samples are reduced one chunk at a time, and each chunk yields the `MOMENTS` of each statistic, in
float64. These are merged by the formulas for parts of a whole: T. F. Chan, G. H. Golub and R. J.
LeVeque, "Algorithms for computing the sample variance", The American Statistician 37 (1983).
"""

from __future__ import annotations

import numpy as np

from comgra_decl.stats.statistics import FORMULAS, Floats, row_statistics

MOST_ROWS = 1 << 17
"""Maximum number of samples a tensor may have for each to get its own row of raw sums. The rows
take 8 MiB."""
KEPT = 1 << 12
"""In tensors with more samples, the number of leading samples that have a row each."""
CHUNK_ROWS = 1 << 18
"""Number of samples that are reduced at a time above `MOST_ROWS`. Their raw sums take 16 MiB."""
MOMENTS = 4
"""Number of samples, mean of the statistic, sum of squared deviations, largest magnitude."""


def moments(raw: Floats, elements: int) -> Floats:
    """Return the moments [len(FORMULAS), MOMENTS] of the statistics of samples.

    Args:
        raw: float64 [8, rows], the columns of `records.Raw` first; rows > 0.
        elements: elements per sample.
    """
    found = row_statistics(raw, np.full(raw.shape[1], float(elements)), FORMULAS)
    with np.errstate(all="ignore"):
        mean = found.mean(1)
        squares = np.square(found - mean[:, None]).sum(1)
        number = np.full(len(FORMULAS), float(raw.shape[1]))
        return np.stack((number, mean, squares, np.abs(found).max(1)), 1)


def joined(parts: Floats) -> Floats:
    """Return mean, std and abs-max [len(FORMULAS), 3] over the samples of all parts.

    Args:
        parts: moments [k, len(FORMULAS), MOMENTS], k > 0.
    """
    with np.errstate(all="ignore"):
        number, means, squares, largest = np.moveaxis(parts, -1, 0)
        total = number.sum(0)
        mean = (number * means).sum(0) / total
        spread = squares.sum(0) + (number * np.square(means - mean)).sum(0)
        return np.stack((mean, np.sqrt(spread / total), largest.max(0)), 1)
