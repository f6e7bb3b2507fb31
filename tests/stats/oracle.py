"""The statistics of a tensor, computed in float64 with plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from comgra_decl.records import STATISTICS

Floats = NDArray[np.float64]


def rows_of(tensor: torch.Tensor, batch_dim: int | None) -> Floats:
    """Returns the samples of a tensor as rows [samples, elements]; magnitudes if it is complex."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        array: NDArray[Any] = np.abs(tensor.to(torch.complex128).numpy())
    else:
        array = tensor.to(torch.float64).numpy()
    if batch_dim is None:
        return array.reshape(1, array.size)
    moved = np.moveaxis(array, batch_dim, 0)
    return moved.reshape(moved.shape[0], int(np.prod(moved.shape[1:])))


def statistics_of(rows: Floats) -> dict[str, Floats]:
    """Returns every statistic of each row [samples]."""
    if rows.shape[1] == 0:
        nothing = np.full(len(rows), np.nan)
        none = np.zeros(len(rows))
        return dict.fromkeys(STATISTICS, nothing) | {"l2": none, "nonfinite": none}
    with np.errstate(all="ignore"):
        return {
            "mean": rows.mean(1),
            "abs_mean": np.abs(rows).mean(1),
            "std": rows.std(1),
            "min": rows.min(1),
            "max": rows.max(1),
            "abs_max": np.abs(rows).max(1),
            "l2": np.linalg.norm(rows, axis=1),
            "zero_fraction": (rows == 0).mean(1),
            "nonfinite": (~np.isfinite(rows)).sum(1).astype(np.float64),
        }


def over_batch(statistic: Floats) -> Floats:
    """Returns mean, std and abs-max over the samples, [3]."""
    with np.errstate(all="ignore"):
        return np.array([statistic.mean(), statistic.std(), np.abs(statistic).max()])
