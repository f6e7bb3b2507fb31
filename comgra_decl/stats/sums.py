"""Four ways to compute raw sums, all with the same results.

All give float64 with the columns of `records.Raw`, one row per sample. They differ in the value
subtracted before squaring (the pivot), which is therefore part of the row:

`compiled` one pass of a kernel compiled for this CPU (`kernel`), if available.
`exact`   float64 throughout, any device, never waits for the device. The reference, and the
          recipe for float64, wide integers and accelerators.
`small`   many short float32 rows at once; the pivot is the row's mean.
`large`   few long rows, block by block. No pivot at first: subtracting one costs another pass,
          and it matters only where |mean| >> std, which the sums reveal.

The float32 recipes use only operations that torch vectorises (`var_mean`, `aminmax` and
`count_nonzero` are 10 to 100 times slower on a CPU than `sum`), and only `sum` for adding, because
it sums pairwise: `vector_norm` is a little faster than squaring first, but loses digits. Rows that
float32 cannot hold (NaN, infinities, squares that overflow or underflow) are recognised by their
sums and recomputed with `exact`; therefore, NaN and infinite values are always counted exactly.

All must run inside `quiet()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import RAW_STATISTICS, Raw
from comgra_decl.stats.kernel import Kernel, kernel_for
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.support import work_dtype

Rows = NDArray[np.float64]

BLOCK = 1 << 18
"""Number of elements per operation and thread. Smaller blocks need more calls; larger blocks exceed
the cache.
"""
PIVOT_ELEMENTS = 4096
MOST_BLOCK = 1 << 22
"""Maximum number of elements per operation, to limit memory use."""
_TINY = 1e-32  # mean squares below this may have lost elements to float32 underflow
_HUGE = 3e38
_LEAST_SPREAD = 1e-16  # squares of smaller differences underflow in float32
_MOST_DESKS = 256
_FEW_ROWS = 16  # up to this, numpy's count_nonzero per row beats a vectorised sign and sum
_CPU = torch.device("cpu")


def exact(x: Tensor, pivot: Tensor | None = None) -> Tensor:
    """Return the raw sums over the last dim, computed in float64 on the tensor's device.

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


def first_mean(x: Tensor, wide: torch.dtype = torch.float64) -> Tensor:
    """Return the mean of each row's first 4096 elements, 0 where it is not finite."""
    mean: Tensor = x[..., :PIVOT_ELEMENTS].mean(-1, dtype=wide)
    return mean.nan_to_num_(0.0, 0.0, 0.0)


def exact_large(x: Tensor, block: int = MOST_BLOCK) -> Tensor:
    """Return `exact` for [rows, n], computed on at most `block` elements at a time."""
    return _by_blocks(exact, x, block)


def _by_blocks(
    recipe: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    block: int,
    wide: torch.dtype = torch.float64,
) -> Tensor:
    pivot = first_mean(x, wide)
    parts = []
    for rows in _spans(x.shape[0], max(1, block // x.shape[1])):
        columns = _spans(x.shape[1], block)
        parts.append(merge([recipe(x[rows, span], pivot[rows]) for span in columns]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def lean(x: Tensor, wide: torch.dtype = torch.float64) -> Tensor:
    """Return `exact` for rows [r, n] on an accelerator, without a float64 copy of them.

    Torch's reductions read float32 and add in float64. The squared differences are computed in
    float32, so values that spread by less than 1e-7 of their mean have lost digits.

    Args:
        x: real numbers, n > 0.
        wide: dtype of the sums and of the result: float32 on devices without float64, where counts
            beyond 2^24 lose their last digits.
    """
    if work_dtype(x.dtype) is torch.float64:
        return exact_large(x)
    return _by_blocks(partial(_lean, wide=wide), x, MOST_BLOCK, wide)


def _lean(x: Tensor, pivot: Tensor, *, wide: torch.dtype) -> Tensor:
    # each operation is a kernel: counts are exact in float32, since blocks are smaller than 2^24
    narrow = x.to(torch.float32)
    about = pivot.to(torch.float32)
    sums = [torch.empty(0)] * RAW_STATISTICS
    sums[Raw.PIVOT] = about
    sums[Raw.MIN], sums[Raw.MAX] = narrow.aminmax(dim=-1)
    sums[Raw.ABS_SUM] = _power_sum(narrow, 1, wide)
    sums[Raw.NONZERO] = _nonzero(narrow, wide)
    centred = narrow - about.unsqueeze(-1)
    sums[Raw.SUM] = centred.sum(-1, dtype=wide)
    sums[Raw.SQUARES] = _power_sum(centred, 2, wide)
    sums[Raw.NONFINITE] = _nonzero(centred.sub_(centred), wide)  # NaN where x is not finite
    return torch.stack(sums, -1)


def _nonzero(numbers: Tensor, wide: torch.dtype) -> Tensor:
    if wide is not torch.float64:  # norms are not supported everywhere
        return (numbers != 0).sum(-1, dtype=torch.float32)
    found: Tensor = torch.linalg.vector_norm(numbers, 0, -1)
    return found


def _power_sum(numbers: Tensor, power: int, wide: torch.dtype) -> Tensor:
    """Return sums of powers of magnitudes, without a copy where that loses no digits."""
    if wide is not torch.float64:
        return (numbers.abs() if power == 1 else numbers.square()).sum(-1)
    found: Tensor = torch.linalg.vector_norm(numbers, power, -1, dtype=wide)
    return found.square_() if power == 2 else found


def merge(parts: list[Tensor]) -> Tensor:
    """Return the raw sums of rows, given those of their pieces (with a common pivot)."""
    if len(parts) == 1:
        return parts[0]
    pieces = torch.stack(parts)
    merged = pieces.sum(0)
    merged[..., Raw.PIVOT] = pieces[0, ..., Raw.PIVOT]
    merged[..., Raw.MIN] = pieces[..., Raw.MIN].amin(0)
    merged[..., Raw.MAX] = pieces[..., Raw.MAX].amax(0)
    return merged


def small(x: Tensor, out: Rows) -> None:
    """Write the raw sums of float32 rows [..., n], n > 0, on the CPU into `out` [..., 8]."""
    n = x.shape[-1]
    table = np.zeros((RAW_STATISTICS, *x.shape[:-1]))
    total = x.sum(-1, dtype=torch.float64)
    pivot = (total / n).to(torch.float32).nan_to_num_(0.0, 0.0, 0.0)
    scratch = torch.sub(x, pivot.unsqueeze(-1))
    table[Raw.PIVOT] = pivot.numpy()
    # the total is float64, so this gives the sum about the pivot without another pass
    np.multiply(table[Raw.PIVOT], -n, out=table[Raw.SUM])
    table[Raw.SUM] += total.numpy()
    table[Raw.SQUARES] = scratch.square_().sum(-1).numpy()
    table[Raw.MIN], table[Raw.MAX] = x.amin(-1).numpy(), x.amax(-1).numpy()
    table[Raw.ABS_SUM] = torch.abs(x, out=scratch).sum(-1).numpy()
    table[Raw.NONZERO] = scratch.sign_().sum(-1).numpy()
    out[...] = np.moveaxis(table, 0, -1)
    bad = np.nonzero(~_represented(table))
    if len(bad[0]):
        out[bad] = exact(x[tuple(torch.from_numpy(i) for i in bad)]).numpy()


def _represented(table: Rows) -> NDArray[np.bool_]:
    """Return a mask of the rows of `small` [8, ...] that fit float32; False if a sum is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        spread = table[Raw.MAX] - table[Raw.MIN]
        size = table[Raw.SQUARES] + table[Raw.ABS_SUM]
    good: NDArray[np.bool_] = size < _HUGE
    good &= (spread > _LEAST_SPREAD) | (spread == 0.0)
    return good


def compiled(x: Tensor, out: Rows) -> bool:
    """Write raw sums of host rows with the compiled kernel. Return False if there is none.

    Args:
        x: [k, rows, n], n > 0, each of the k parts contiguous.
        out: [k, rows, 8], likewise.
    """
    kernel = kernel_for(x.dtype)
    if kernel is None:
        return False
    parts, rows, n = x.shape
    source, target = x.data_ptr(), out.__array_interface__["data"][0]
    step, out_step = x.stride(0) * x.element_size(), out.strides[0]
    marked = 0
    for i in range(parts):
        marked += kernel(source + i * step, rows, n, target + i * out_step)
    if marked:
        bad = np.nonzero(out[..., Raw.NONFINITE] < 0)
        out[bad] = exact_large(x[tuple(torch.from_numpy(i) for i in bad)]).numpy()
    return True


def compiled_at(kernel: Kernel, x: Tensor, rows: int, n: int) -> Rows | None:
    """Return the raw sums [rows, 8] of contiguous memory; None if the kernel marks any row.

    Like `compiled`, but for one large tensor, without calls that would double the cost.
    """
    out = np.empty((rows, RAW_STATISTICS))
    marked = kernel(x.data_ptr(), rows, n, out.__array_interface__["data"][0])
    return None if marked else out


class LargeSums:
    """The recipe for a few long rows on the CPU; owns one block of scratch memory."""

    def __init__(self) -> None:
        self._scratch = buffer(0, dtype=torch.float32, device=_CPU)
        self._desks: dict[tuple[int, int], _Desk] = {}

    def __call__(self, x: Tensor) -> Rows:
        """Return the raw sums [r, 8] of contiguous rows [r, n], r and n > 0."""
        work = work_dtype(x.dtype)
        if x.numel() <= MOST_BLOCK and kernel_for(x.dtype) is None:
            x = x.to(work)
        out = np.empty((x.shape[0], RAW_STATISTICS))
        if compiled(x.unsqueeze(0), out[None]):
            return out
        return exact_large(x).numpy() if work is torch.float64 else self.passes(x).T

    def passes(self, x: Tensor) -> Rows:
        """Return the raw sums [8, r] (columns first) with torch's operations, up to float32."""
        rows, n = x.shape
        block = min(BLOCK * torch.get_num_threads(), MOST_BLOCK)
        if rows * n <= block:
            sums = self._block(x)
        else:
            parts = [
                _add([self._block(x[part, span]) for span in _spans(n, block)])
                for part in _spans(rows, max(1, block // n))
            ]
            sums = np.concatenate(parts, axis=1)
        total, squares = sums[Raw.SUM], sums[Raw.SQUARES]
        # n mean^2 <= 9/10 of the squares: the variance lost at most a digit; False for NaN
        fine = total * total <= (0.9 * n) * squares
        fine &= _held(squares, sums[Raw.ABS_SUM], n)
        if not fine.all():
            self._mend(x, sums, fine, block)
        return sums

    def _block(self, x: Tensor) -> Rows:
        """Return the raw sums [8, r] about zero of at most one block [r, n]."""
        if x.dtype is not torch.float32:
            x = x.to(torch.float32)
        desk = self._desk(x)
        total, squares, absolute, low, high, least = desk.results
        torch.sum(x, 1, out=total)
        torch.amin(x, 1, out=low)
        torch.amax(x, 1, out=high)
        scratch = torch.abs(x, out=desk.scratch)
        torch.sum(scratch, 1, out=absolute)
        # most tensors have no zeros; checking that is faster than counting them
        torch.amin(scratch, 1, out=least)
        nonzero = x.shape[1] if desk.table[-1].all() else _count_nonzero(scratch)
        torch.sum(scratch.square_(), 1, out=squares)
        out = np.zeros((RAW_STATISTICS, x.shape[0]))
        out[Raw.SUM : Raw.MAX + 1] = desk.table[:-1]
        out[Raw.NONZERO] = nonzero
        return out

    def _mend(self, x: Tensor, sums: Rows, fine: NDArray[np.bool_], block: int) -> None:
        """Recompute rows, about their mean where |mean| >> std and in float64 elsewhere."""
        low, high = sums[Raw.MIN], sums[Raw.MAX]
        with np.errstate(invalid="ignore", over="ignore"):
            spread = high - low
        held = _held(sums[Raw.SQUARES], sums[Raw.ABS_SUM], x.shape[1])
        held &= (spread > _LEAST_SPREAD) | (spread == 0.0)
        for row in np.flatnonzero(~fine):
            if held[row]:
                pivot = low[row] if spread[row] == 0.0 else sums[Raw.SUM, row] / x.shape[1]
                sums[: Raw.SQUARES + 1, row] = self._centre(x[row], float(pivot), block)
            elif low[row] != 0.0 or high[row] != 0.0:
                sums[:, row] = exact_large(x[row : row + 1])[0].numpy()

    def _centre(self, x: Tensor, mean: float, block: int) -> tuple[float, float, float]:
        """Return pivot, sum and squares about the mean of one row."""
        pivot = float(np.float32(mean))
        total = squares = 0.0
        for span in _spans(x.shape[0], block):
            piece = x[span].to(torch.float32)
            centred = torch.sub(piece, pivot, out=self._desk(piece.unsqueeze(0)).scratch[0])
            total += centred.sum().item()
            squares += centred.square_().sum().item()
        return pivot, total, squares

    def _desk(self, x: Tensor) -> _Desk:
        rows, n = x.shape
        desk = self._desks.get((rows, n))
        if desk is None:
            if self._scratch.numel() < rows * n:
                self._scratch = buffer(rows * n, dtype=torch.float32, device=_CPU)
                self._desks.clear()
            if len(self._desks) > _MOST_DESKS:
                self._desks.clear()
            desk = self._desks[rows, n] = _Desk(self._scratch, rows, n)
        return desk


class _Desk:
    """Scratch memory and result buffers of one shape."""

    def __init__(self, scratch: Tensor, rows: int, n: int) -> None:
        self.scratch = scratch[: rows * n].view(rows, n)
        table = buffer(Raw.NONZERO, rows, dtype=torch.float32, device=_CPU)
        self.table = table.numpy()
        self.results = table.unbind()


def _held(squares: Rows, absolute: Rows, n: int) -> NDArray[np.bool_]:
    """Return a mask of the rows in which no float32 sum overflowed, underflowed or is NaN."""
    held: NDArray[np.bool_] = squares > _TINY * n
    held &= squares + absolute < _HUGE
    return held


def _count_nonzero(magnitudes: Tensor) -> NDArray[np.float64]:
    """Return the number of non-zero elements per row of |x| in float32."""
    if magnitudes.shape[0] > _FEW_ROWS:
        return magnitudes.sign().sum(1).numpy().astype(np.float64)
    # as integers, because only +0.0 has no bit set, and numpy counts integers with SIMD
    rows = magnitudes.numpy().view(np.int32)
    return np.array([np.count_nonzero(row) for row in rows], dtype=np.float64)


def _add(parts: list[Rows]) -> Rows:
    """Return the raw sums [8, r] about zero of rows from those of their pieces."""
    if len(parts) == 1:
        return parts[0]
    pieces = np.stack(parts)
    merged: Rows = pieces.sum(0)
    merged[Raw.MIN] = pieces[:, Raw.MIN].min(0)
    merged[Raw.MAX] = pieces[:, Raw.MAX].max(0)
    return merged


def _spans(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
