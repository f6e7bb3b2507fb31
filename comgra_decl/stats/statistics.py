r"""Define each statistic in terms of raw sums.

One row holds the sums over the n elements x of one sample (`records.Raw`): the pivot p,
S = sum(x - p), Q = sum((x - p)^2), A = sum|x|, min, max, Z = number of x != 0, and F = number of x
that are NaN or infinite. Then, with d = S / n:

    mean           p + d
    abs_mean       A / n
    std            sqrt(max(0, Q / n - d^2))            population (ddof 0), over one sample
    min, max       min, max
    abs_max        max(|min|, |max|)
    l2             sqrt(Q + 2 p S + n p^2)              of one sample, not divided by n
    zero_fraction  1 - Z / n
    nonfinite      F                                    a count, not a fraction
    rms            l2 / sqrt(n)                         opt-in
    snr            |mean| / std                         opt-in; equal values: inf, zeros: NaN

The variance from the shifted sums is exact to rounding if p is near the mean, which is the purpose
of pivots: T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for computing the sample
variance", The American Statistician 37 (1983).

NaN and infinities propagate as in numpy: mean, l2, min and max of a row with a NaN are NaN; the
mean is inf if only +inf occurs; std is NaN if any NaN or infinity occurs. A sample without elements
has l2 0 and nonfinite 0 (as numpy's norm and sum of an empty array) and NaN for all others.

Over the batch, each statistic s of the samples 1..m is aggregated (`records.AGGREGATES`):

    mean           sum(s) / m
    std            sqrt(sum((s - mean)^2) / m)          population, over samples
    abs_max        max|s|

A tensor without a batch dim is one sample: mean = s, std = 0. For an empty batch, aggregates are
NaN, except those of nonfinite, which are 0, because that statistic is NaN only if a record is
missing. For tensors with very many samples, the same three numbers are computed in a different
order (`moments`).

Integers, booleans and all floats are used as they are; complex numbers by their magnitude. Sparse,
nested, quantised and meta tensors have no statistics; the run's report lists them by name. A sparse
gradient is therefore missing, not 0.

Elements of float32 and smaller types are summed about a pivot in float32, a few hundred at a time,
and these sums are added in float64. The error of a mean close to 0 is therefore the error of
rounding the largest element to float32. Everything else is computed in float64 and stored as
float32. Magnitudes above 3.4e38 are stored as infinity with their sign, but nonfinite, a count of
elements, is still 0. Magnitudes below 1.4e-45 are stored as 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import Raw

Floats = NDArray[np.float64]


def row_statistics(raw: Floats, elements: Floats, names: tuple[str, ...]) -> Floats:
    """Return the statistics of samples.

    Args:
        raw: float64 [8, ..., rows], the columns of `records.Raw` first.
        elements: float64 [rows], elements per sample.
        names: statistics of `records.STATISTICS`, "rms" or "snr".

    Returns:
        float64 [len(names), ..., rows].
    """
    out = np.empty((len(names), *raw.shape[1:]))
    with np.errstate(all="ignore"):
        for i, name in enumerate(names):
            _FORMULAS[name](raw, elements, out[i])
        if not elements.all():
            _blank_empty(out, elements == 0, names)
    return out


def _mean(raw: Floats, n: Floats, out: Floats) -> None:
    np.divide(raw[Raw.SUM], n, out=out)
    out += raw[Raw.PIVOT]


def _abs_mean(raw: Floats, n: Floats, out: Floats) -> None:
    np.divide(raw[Raw.ABS_SUM], n, out=out)


def _std(raw: Floats, n: Floats, out: Floats) -> None:
    np.divide(raw[Raw.SUM], n, out=out)
    np.square(out, out=out)
    np.subtract(raw[Raw.SQUARES] / n, out, out=out)
    np.maximum(out, 0.0, out=out)  # NaN stays
    np.sqrt(out, out=out)


def _min(raw: Floats, _n: Floats, out: Floats) -> None:
    out[...] = raw[Raw.MIN]


def _max(raw: Floats, _n: Floats, out: Floats) -> None:
    out[...] = raw[Raw.MAX]


def _abs_max(raw: Floats, _n: Floats, out: Floats) -> None:
    np.maximum(-raw[Raw.MIN], raw[Raw.MAX], out=out)  # = max(|min|, |max|) since min <= max


def _l2(raw: Floats, n: Floats, out: Floats) -> None:
    # p (2 S + n p) rather than 2 p S + n p^2: one infinite sum must not meet another's opposite
    np.multiply(raw[Raw.PIVOT], n, out=out)
    out += raw[Raw.SUM]
    out += raw[Raw.SUM]
    out *= raw[Raw.PIVOT]
    out += raw[Raw.SQUARES]
    np.copyto(out, np.inf, where=np.isposinf(raw[Raw.SQUARES]))
    np.maximum(out, 0.0, out=out)
    np.sqrt(out, out=out)


def _zero_fraction(raw: Floats, n: Floats, out: Floats) -> None:
    np.subtract(n, raw[Raw.NONZERO], out=out)
    out /= n


def _nonfinite(raw: Floats, _n: Floats, out: Floats) -> None:
    out[...] = raw[Raw.NONFINITE]


def _rms(raw: Floats, n: Floats, out: Floats) -> None:
    _l2(raw, n, out)
    out /= np.sqrt(n)


def _snr(raw: Floats, n: Floats, out: Floats) -> None:
    mean = np.empty_like(out)
    _mean(raw, n, mean)
    _std(raw, n, out)
    np.divide(np.abs(mean), out, out=out)


_FORMULAS: dict[str, Callable[[Floats, Floats, Floats], None]] = {
    "mean": _mean,
    "abs_mean": _abs_mean,
    "std": _std,
    "min": _min,
    "max": _max,
    "abs_max": _abs_max,
    "l2": _l2,
    "zero_fraction": _zero_fraction,
    "nonfinite": _nonfinite,
    "rms": _rms,
    "snr": _snr,
}
FORMULAS = tuple(_FORMULAS)
"""Names of all statistics computed from raw sums."""


def _blank_empty(out: Floats, empty: NDArray[np.bool_], names: tuple[str, ...]) -> None:
    for i, name in enumerate(names):
        out[i][..., empty] = 0.0 if name in ("l2", "nonfinite") else np.nan


def aggregate(statistics: Floats, bounds: NDArray[np.intp], owner: NDArray[np.intp]) -> Floats:
    """Return mean, std and abs-max over the samples of each tensor.

    Args:
        statistics: float64 [..., rows].
        bounds: [2 m] first and last-plus-one row of each of m tensors with samples, by first row;
            a last entry that equals the number of rows is left out.
        owner: [rows], the tensor (of these m) of each row.

    Returns:
        float64 [3, ..., m].
    """
    with np.errstate(all="ignore"):
        ends = np.append(bounds, statistics.shape[-1])[1::2]
        number = (ends - bounds[::2]).astype(np.float64)
        mean = np.add.reduceat(statistics, bounds, axis=-1)[..., ::2]
        mean /= number
        deviation = statistics - mean.take(owner, axis=-1)
        np.square(deviation, out=deviation)
        std = np.add.reduceat(deviation, bounds, axis=-1)[..., ::2]
        std /= number
        np.sqrt(std, out=std)
        np.abs(statistics, out=deviation)
        return np.stack((mean, std, np.maximum.reduceat(deviation, bounds, axis=-1)[..., ::2]))
