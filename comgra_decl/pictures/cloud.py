"""Point clouds: principal components with one basis for all steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Basis:
    """The axes of a cloud.

    With one basis for all steps, points move only if the data changes. With a separate basis for
    each step, the axes could rotate and flip between steps.

    Attributes:
        mean: [features].
        components: [axes, features], orthonormal.
        explained: [axes], the share of the fitted points' variance along each axis.
        steps: the number of steps that were fitted.
        node: the node that was fitted; "" for any.
    """

    mean: Floats
    components: Floats
    explained: Floats
    steps: int
    node: str = ""

    def project(self, points: NDArray[np.floating]) -> Floats:
        """Return the coordinates [..., axes] of points [..., features]."""
        projected: Floats = (points.astype(np.float64) - self.mean) @ self.components.T
        return projected


def fitted(points: NDArray[np.floating], axes: int = 2) -> Basis:
    """Return the principal axes of points [steps, samples, features].

    The sign of each axis is chosen so that its largest entry is positive, as in scikit-learn.

    Raises:
        ValueError: the points have too few features, or there are fewer than two points.
    """
    steps, features = points.shape[0], points.shape[-1]
    flat = points.reshape(-1, features).astype(np.float64)
    if len(flat) < 2 or min(flat.shape) < axes:
        raise ValueError(
            f"{axes} axes need at least {axes} points with {axes} features each, not {len(flat)} "
            f"with {features}"
        )
    mean = flat.mean(0)
    _, singular, rows = np.linalg.svd(flat - mean, full_matrices=False)
    largest = np.abs(rows).argmax(1)
    rows = rows * np.sign(rows[np.arange(len(rows)), largest])[:, None]
    total = (singular**2).sum()
    shares = singular**2 / total if total else np.full(len(singular), np.nan)
    return Basis(mean, rows[:axes], shares[:axes], steps)
