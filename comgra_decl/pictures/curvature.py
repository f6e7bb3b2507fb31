"""The density of a spectrum, from the peaks that stochastic Lanczos quadrature finds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WIDTH = 0.02
"""Standard deviation of each peak, relative to the distance between the outermost eigenvalues."""


def density(nodes: Floats, weights: Floats, points: int = 200) -> tuple[Floats, Floats]:
    """Return (eigenvalues, density), both [points], with each peak widened to a Gaussian.

    The area under the density is 1 (Ghorbani et al. 2019, equation 4).

    Args:
        nodes: [vectors, peaks], estimated eigenvalues.
        weights: [vectors, peaks], the share of the eigenvalues near each one.
        points: the number of points.
    """
    low, high = float(nodes.min()), float(nodes.max())
    width = _WIDTH * (high - low) or 1e-3 * max(abs(high), 1e-9)
    at = np.linspace(low - 4 * width, high + 4 * width, points)
    peaks = np.exp(-0.5 * ((at[:, None, None] - nodes) / width) ** 2)
    values: Floats = (peaks * weights).sum(2).mean(1) / (width * np.sqrt(2 * np.pi))
    return at, values
