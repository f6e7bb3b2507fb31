"""Maps of a layer: its dead units, the spectrum of its weight, and the Grad-CAM of the loss."""

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
