"""From numbers to raw sums: three recipes, one result.

All return `[..., 8]` float64 with the columns of `records.Raw`, one row per sample. What is
subtracted before squaring (the pivot) differs, which is why it is part of the row:

`exact`   float64 throughout, any device, never waits for the device. The reference, and the
          recipe for float64, wide integers and accelerators.
`small`   many short float32 rows at once; the pivot is the row's mean.
`large`   few long rows, block by block. No pivot at first: subtracting one costs another pass,
          and it matters only where |mean| >> std. Whether it did is seen from the sums.

The float32 recipes use the operations that torch vectorises (`var_mean`, `aminmax` and
`count_nonzero` are 10 to 100 times slower on a CPU than `sum`) and accumulate blockwise. Rows that
float32 cannot hold (NaN, infinities, squares that overflow or vanish) are recognised by their sums
and computed again with `exact`; so NaN and infinities are always counted exactly.

All must run inside `quiet()`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.quiet import buffer

Rows = NDArray[np.float64]

BLOCK = 1 << 18
"""Elements per operation and thread: smaller ones pay for calls, larger ones leave the cache."""
PIVOT_ELEMENTS = 4096
_MOST_BLOCK = 1 << 22
_TINY = 1e-32  # mean squares below this may have lost elements to float32 underflow
_HUGE = 3e38
_FEW_ROWS = 16  # up to here numpy's count_nonzero per row beats a vectorised sign and sum
_CPU = torch.device("cpu")


def exact(x: Tensor, pivot: Tensor | None = None) -> Tensor:
    """Returns the raw sums over the last dim, computed in float64 on the tensor's device.

    Args:
        x: real numbers [..., n], n > 0.
        pivot: float64 [...]; by default the mean of the row's first 4096 elements, or 0 where
            that is not finite.
    """
    if pivot is None:
        pivot = first_mean(x)
    wide = x.to(torch.float64, copy=True)
    sums = [torch.empty(0)] * RAW_STATISTICS
    sums[Raw.PIVOT] = pivot
    sums[Raw.MIN], sums[Raw.MAX] = wide.amin(-1), wide.amax(-1)
    sums[Raw.NONZERO] = (wide != 0).sum(-1, dtype=torch.float64)
    sums[Raw.NONFINITE] = wide.isfinite().logical_not_().sum(-1, dtype=torch.float64)
    sums[Raw.ABS_SUM] = wide.abs().sum(-1)
    centred = wide.sub_(pivot.unsqueeze(-1))
    sums[Raw.SUM] = centred.sum(-1)
    sums[Raw.SQUARES] = centred.square_().sum(-1)
    return torch.stack(sums, -1)


def first_mean(x: Tensor) -> Tensor:
    """Returns the float64 mean of each row's first 4096 elements, 0 where it is not finite."""
    mean = x[..., :PIVOT_ELEMENTS].to(torch.float64).mean(-1)
    return mean.nan_to_num_(0.0, 0.0, 0.0)


def exact_large(x: Tensor, block: int = _MOST_BLOCK) -> Tensor:
    """Returns `exact` of [rows, n], at most `block` elements at a time."""
    pivot = first_mean(x)
    parts = []
    for rows in _spans(x.shape[0], max(1, block // x.shape[1])):
        columns = _spans(x.shape[1], block)
        parts.append(merge([exact(x[rows, span], pivot[rows]) for span in columns]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def merge(parts: list[Tensor]) -> Tensor:
    """Returns the raw sums of rows whose pieces (with the same pivot) have the given raw sums."""
    if len(parts) == 1:
        return parts[0]
    pieces = torch.stack(parts)
    merged = pieces.sum(0)
    merged[..., Raw.PIVOT] = pieces[0, ..., Raw.PIVOT]
    merged[..., Raw.MIN] = pieces[..., Raw.MIN].amin(0)
    merged[..., Raw.MAX] = pieces[..., Raw.MAX].amax(0)
    return merged


def small(x: Tensor, out: Rows) -> None:
    """Writes the raw sums of float32 rows [..., n], n > 0, on the CPU into `out` [..., 8]."""
    total = x.sum(-1, dtype=torch.float64)
    pivot = (total / x.shape[-1]).to(torch.float32).nan_to_num_(0.0, 0.0, 0.0)
    scratch = torch.sub(x, pivot.unsqueeze(-1))
    squares = torch.linalg.vector_norm(scratch, 2, -1)
    low, high = x.amin(-1), x.amax(-1)
    absolute = torch.abs(x, out=scratch).sum(-1)
    nonzero = scratch.sign_().sum(-1)
    out[..., Raw.PIVOT] = pivot.numpy()
    # the total is a float64, so this is the sum about the pivot without another pass
    np.subtract(total.numpy(), out[..., Raw.PIVOT] * x.shape[-1], out=out[..., Raw.SUM])
    np.square(squares.numpy(), out=out[..., Raw.SQUARES], dtype=np.float64)
    out[..., Raw.ABS_SUM] = absolute.numpy()
    out[..., Raw.MIN], out[..., Raw.MAX] = low.numpy(), high.numpy()
    out[..., Raw.NONZERO] = nonzero.numpy()
    out[..., Raw.NONFINITE] = 0.0
    _mend(x, out)


def _mend(x: Tensor, out: Rows) -> None:
    """Computes again the rows of `small` that float32 could not hold."""
    with np.errstate(invalid="ignore", over="ignore"):
        spread = out[..., Raw.MAX] - out[..., Raw.MIN]
        size = out[..., Raw.SQUARES] + out[..., Raw.ABS_SUM]
    # NaN compares false: such a row is not good
    good = (size < _HUGE) & ((spread > 1e-16) | (spread == 0.0))
    if not good.all():
        bad = np.nonzero(~good)
        out[bad] = exact(x[tuple(torch.from_numpy(i) for i in bad)]).numpy()


class LargeSums:
    """The recipe for few long rows on the CPU; owns the scratch memory it needs (one block)."""

    def __init__(self) -> None:
        self._scratch = buffer(0, dtype=torch.float32, device=_CPU)

    def __call__(self, x: Tensor) -> Rows:
        """Returns the raw sums of contiguous rows [r, n], r and n > 0.

        x: float32, or narrower (converted block by block); anything else is left to `exact`.
        """
        rows, n = x.shape
        block = min(BLOCK * torch.get_num_threads(), _MOST_BLOCK)
        if rows * n <= block:
            sums = self._block(x)
        else:
            parts = [
                _add([self._block(x[part, span]) for span in _spans(n, block)])
                for part in _spans(rows, max(1, block // n))
            ]
            sums = np.concatenate(parts)
        return self._checked(x, sums, block)

    def _block(self, x: Tensor) -> Rows:
        """Returns the raw sums about zero of at most one block [r, n]."""
        if x.dtype is not torch.float32:
            x = x.to(torch.float32)
        out = np.zeros((x.shape[0], RAW_STATISTICS))
        scratch = self._like(x)
        total, squares = x.sum(1), torch.linalg.vector_norm(x, 2, 1)
        low, high = x.amin(1), x.amax(1)
        absolute = torch.abs(x, out=scratch).sum(1)
        table = torch.stack((total, squares, absolute, low, high), 1).numpy()
        out[:, Raw.SUM : Raw.MAX + 1] = table
        out[:, Raw.SQUARES] *= out[:, Raw.SQUARES]
        out[:, Raw.NONZERO] = _count_nonzero(scratch)
        return out

    def _checked(self, x: Tensor, sums: Rows, block: int) -> Rows:
        """Returns `sums`, with rows that need it computed about their mean, or in float64."""
        n = x.shape[1]
        total, squares = sums[:, Raw.SUM], sums[:, Raw.SQUARES]
        with np.errstate(invalid="ignore", over="ignore"):
            spread = sums[:, Raw.MAX] - sums[:, Raw.MIN]
            # n mean^2 <= 9/10 of the squares: the variance has lost at most a digit
            fine = total * total <= (0.9 * n) * squares
            fine &= (squares > _TINY * n) & (squares + sums[:, Raw.ABS_SUM] < _HUGE)
        if fine.all():
            return sums
        held = (squares + sums[:, Raw.ABS_SUM] < _HUGE) & (squares > _TINY * n)
        held &= (spread > 1e-16) | (spread == 0.0)
        zero = (sums[:, Raw.MIN] == 0.0) & (sums[:, Raw.MAX] == 0.0)
        self._centre(x, sums, np.nonzero(held & ~fine)[0], block)
        for row in np.nonzero(~held & ~zero)[0]:
            sums[row] = exact_large(x[row : row + 1])[0].numpy()
        return sums

    def _centre(self, x: Tensor, sums: Rows, rows: NDArray[np.intp], block: int) -> None:
        """Computes sum and squares of some rows about their mean, where |mean| >> std."""
        for row in rows:
            low, high = sums[row, Raw.MIN], sums[row, Raw.MAX]
            pivot = float(np.float32(low if low == high else sums[row, Raw.SUM] / x.shape[1]))
            total = squares = 0.0
            for span in _spans(x.shape[1], block):
                piece = x[row, span].to(torch.float32)
                centred = torch.sub(piece, pivot, out=self._like(piece))
                total += centred.sum().item()
                squares += torch.linalg.vector_norm(centred).item() ** 2
            sums[row, : Raw.SQUARES + 1] = pivot, total, squares

    def _like(self, x: Tensor) -> Tensor:
        if self._scratch.numel() < x.numel():
            self._scratch = buffer(x.numel(), dtype=torch.float32, device=_CPU)
        return self._scratch[: x.numel()].view(x.shape)


def _count_nonzero(magnitudes: Tensor) -> NDArray[np.float64]:
    """Returns the number of non-zero elements per row of |x| float32 (destroys it)."""
    if magnitudes.shape[0] > _FEW_ROWS:
        return magnitudes.sign_().sum(1).numpy().astype(np.float64)
    # as integers, because only +0.0 has no bit set, and numpy counts integers with SIMD
    rows = magnitudes.numpy().view(np.int32)
    return np.array([np.count_nonzero(row) for row in rows], dtype=np.float64)


def _add(parts: list[Rows]) -> Rows:
    """Returns the raw sums about zero of rows from those of their pieces."""
    if len(parts) == 1:
        return parts[0]
    pieces = np.stack(parts)
    merged: Rows = pieces.sum(0)
    merged[:, Raw.MIN] = pieces[:, :, Raw.MIN].min(0)
    merged[:, Raw.MAX] = pieces[:, :, Raw.MAX].max(0)
    return merged


def _spans(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
