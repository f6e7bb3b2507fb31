"""Triton kernels that read each number once and return raw sums of tensor pieces.

A launch covers any number of tensors of one dtype. A table tells each program what to read: a piece
of a long row, or several short rows. The result is one row of `records.Raw` columns per piece or
short row, each about its own pivot; `fused` merges the pieces of a row.

For tensors with very many samples, `row_moments` reads the results of each sample and computes the
moments of the statistics (`moments`).

Float32 lanes sum at most 64 numbers each, and the lanes are summed in float64. If squares overflow
float32, or squares of differences underflow in it, the numbers are read again in float64.

The kernels run on tensors on the host under Triton's interpreter (`TRITON_INTERPRET=1`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped"
# mypy: disable-error-code="import-not-found,unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl

from comgra_decl.records import RAW_STATISTICS
from comgra_decl.stats.moments import MOMENTS
from comgra_decl.stats.statistics import FORMULAS

COLUMNS = 9
"""Columns of the table: tensor, first element, elements per row, rows, first result row. The
columns for the samples follow: first element, stride, count, and position of the first.
"""

_HUGE = 3e38  # larger float32 sums have overflowed or are about to
_LEAST_SPREAD = 1e-16  # squares of smaller differences underflow in float32

COLUMNS_ = tl.constexpr(COLUMNS)
STATISTICS_ = tl.constexpr(RAW_STATISTICS)
MOMENTS_ = tl.constexpr(MOMENTS)
FORMULAS_ = tl.constexpr(len(FORMULAS))
HUGE_ = tl.constexpr(_HUGE)
LEAST_SPREAD_ = tl.constexpr(_LEAST_SPREAD)


@triton.jit
def _finite_or_zero(x):
    return tl.where(x - x == 0.0, x, 0.0)


@triton.jit
def _long_sums(x, length, WORK: tl.constexpr, BLOCK: tl.constexpr):
    """Return the raw sums of `length` numbers from `x` on, and whether they fit `WORK`."""
    lanes = tl.arange(0, BLOCK)
    head = tl.load(x + lanes, mask=lanes < length, other=0.0).to(WORK)
    few = tl.minimum(length, BLOCK).to(tl.float64)
    pivot = _finite_or_zero(tl.sum(head.to(tl.float64), 0) / few).to(WORK)
    total = tl.zeros([BLOCK], WORK)
    squares = tl.zeros([BLOCK], WORK)
    absolute = tl.zeros([BLOCK], WORK)
    low = tl.full([BLOCK], float("inf"), WORK)
    high = tl.full([BLOCK], float("-inf"), WORK)
    zeros = tl.zeros([BLOCK], tl.int32)
    finite = tl.zeros([BLOCK], tl.int32)
    unequal = tl.zeros([BLOCK], tl.int32)
    whole = length // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        v = tl.load(x + start + lanes).to(WORK)
        d = v - pivot
        a = tl.abs(v)
        total += d
        squares += d * d
        absolute += a
        low = tl.minimum(low, v)
        high = tl.maximum(high, v)
        zeros += (v == 0.0).to(tl.int32)
        finite += (a < float("inf")).to(tl.int32)
        unequal += (v != v).to(tl.int32)
    if whole < length:
        inside = whole + lanes < length
        v = tl.load(x + whole + lanes, mask=inside, other=0.0).to(WORK)
        d = tl.where(inside, v - pivot, 0.0)
        a = tl.abs(v)
        total += d
        squares += d * d
        absolute += a
        low = tl.where(inside, tl.minimum(low, v), low)
        high = tl.where(inside, tl.maximum(high, v), high)
        zeros += (inside & (v == 0.0)).to(tl.int32)
        finite += (inside & (a < float("inf"))).to(tl.int32)
        unequal += (v != v).to(tl.int32)
    least = tl.min(low, 0).to(tl.float64)
    most = tl.max(high, 0).to(tl.float64)
    sum_ = tl.sum(total.to(tl.float64), 0)
    of_squares = tl.sum(squares.to(tl.float64), 0)
    of_sizes = tl.sum(absolute.to(tl.float64), 0)
    nonzero = (length - tl.sum(zeros, 0)).to(tl.float64)
    bad = (length - tl.sum(finite, 0)).to(tl.float64)
    nans = tl.sum(unequal, 0)
    spread = most - least
    held = (of_squares + of_sizes < HUGE_) & ((spread > LEAST_SPREAD_) | (spread == 0.0))
    if bad > 0:  # no sum is finite; its value does not depend on the finite numbers
        plus = (most == float("inf")) & (nans == 0)
        minus = (least == float("-inf")) & (nans == 0)
        of_sizes = tl.where(nans > 0, float("nan"), float("inf")).to(tl.float64)
        of_squares = of_sizes
        sum_ = tl.where(plus, float("inf"), float("-inf")).to(tl.float64)
        sum_ = tl.where(plus == minus, float("nan"), sum_).to(tl.float64)
        least = tl.where(nans > 0, float("nan"), least).to(tl.float64)
        most = tl.where(nans > 0, float("nan"), most).to(tl.float64)
        held = held | True
    return pivot.to(tl.float64), sum_, of_squares, of_sizes, least, most, nonzero, bad, held


@triton.jit
def _copy_samples(x, entry, samples, sample_place, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    first, stride = tl.load(entry + 5), tl.load(entry + 6)
    number, place = tl.load(entry + 7), tl.load(entry + 8) + sample_place
    for start in range(0, number, BLOCK):
        inside = start + lanes < number
        v = tl.load(x + first + (start + lanes) * stride, mask=inside, other=0.0)
        tl.store(samples + place + start + lanes, v.to(tl.float32), mask=inside)


# places differ between launches; do not compile a variant for each
@triton.jit(do_not_specialize=["place", "sample_place"])
def long_rows(
    x,
    pointers,
    table,
    results,
    samples,
    place,
    sample_place,
    TYPE: tl.constexpr,
    WORK: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Each program reads a piece of one row.

    Args:
        x: the tensor, if there is only one.
        pointers: int64, start addresses of several tensors.
        table: int64 [programs, COLUMNS].
        results: float64 [., 8], written from row `place` on.
        samples: float32, written from `sample_place` on.
        place: offset of the table's result rows.
        sample_place: offset of the table's sample places.
        TYPE: dtype of the numbers in memory.
        WORK: float32 or float64.
        BLOCK: numbers read at a time.
        MANY: whether `pointers` gives the tensors.
        ALIGNED: whether each piece starts at a multiple of 16 bytes.
        SAMPLED: whether there are samples.
    """
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS_
    if MANY:
        base = tl.load(pointers + tl.load(entry)).to(tl.pointer_type(TYPE))
    else:
        base = x
    data = base + tl.load(entry + 1)
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    length = tl.load(entry + 2)
    pivot, total, squares, absolute, low, high, nonzero, bad, held = _long_sums(
        data, length, WORK, BLOCK
    )
    if WORK == tl.float32:
        if not held:
            pivot, total, squares, absolute, low, high, nonzero, bad, held = _long_sums(
                data, length, tl.float64, BLOCK
            )
    out = results + (tl.load(entry + 4) + place) * STATISTICS_
    tl.store(out, pivot)
    tl.store(out + 1, total)
    tl.store(out + 2, squares)
    tl.store(out + 3, absolute)
    tl.store(out + 4, low)
    tl.store(out + 5, high)
    tl.store(out + 6, nonzero)
    tl.store(out + 7, bad)
    if SAMPLED:
        _copy_samples(base, entry, samples, sample_place, BLOCK)


@triton.jit
def _short_sums(v, n, within, inside, WORK: tl.constexpr):
    """Return the raw sums of each row of a tile, and whether they fit `WORK`."""
    v = v.to(WORK)
    number = n.to(tl.float64)
    zero = tl.zeros_like(v)
    pivot = _finite_or_zero(tl.sum(tl.where(inside, v, zero), 1) / number.to(WORK))
    d = tl.where(inside, v - pivot[:, None], zero)
    a = tl.where(inside, tl.abs(v), zero)
    total = tl.sum(d, 1).to(tl.float64)
    squares = tl.sum(d * d, 1).to(tl.float64)
    absolute = tl.sum(a, 1).to(tl.float64)
    low = tl.min(tl.where(inside, v, float("inf")), 1).to(tl.float64)
    high = tl.max(tl.where(inside, v, float("-inf")), 1).to(tl.float64)
    nonzero = tl.sum((inside & (v != 0.0)).to(tl.int32), 1).to(tl.float64)
    finite = tl.sum((inside & (a < float("inf"))).to(tl.int32), 1)
    bad = number - finite.to(tl.float64)
    nans = tl.sum((inside & (v != v)).to(tl.int32), 1)
    spread = high - low
    held = (squares + absolute < HUGE_) & ((spread > LEAST_SPREAD_) | (spread == 0.0))
    held = held | (bad > 0) | (within == 0)
    none, plus, minus = float("nan"), high == float("inf"), low == float("-inf")
    size = tl.where(nans > 0, none, float("inf"))
    absolute = tl.where(bad > 0, size, absolute)
    squares = tl.where(bad > 0, size, squares)
    sign = tl.where(plus, float("inf"), float("-inf"))
    sign = tl.where((plus == minus) | (nans > 0), none, sign)
    total = tl.where(bad > 0, sign, total)
    low = tl.where(nans > 0, none, low)
    high = tl.where(nans > 0, none, high)
    return pivot.to(tl.float64), total, squares, absolute, low, high, nonzero, bad, held


# places differ between launches; do not compile a variant for each
@triton.jit(do_not_specialize=["place", "sample_place"])
def short_rows(
    x,
    pointers,
    table,
    results,
    samples,
    place,
    sample_place,
    TYPE: tl.constexpr,
    WORK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """Each program reads up to `ROWS` whole rows of at most `WIDTH` numbers, as one tile.

    Arguments as in `long_rows`; each row has one result row.
    """
    entry = table + tl.program_id(0).to(tl.int64) * COLUMNS_
    if MANY:
        base = tl.load(pointers + tl.load(entry)).to(tl.pointer_type(TYPE))
    else:
        base = x
    n, rows = tl.load(entry + 2), tl.load(entry + 3)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    within = row < rows
    inside = within[:, None] & (column < n)[None, :]
    data = base + tl.load(entry + 1)
    v = tl.load(data + row[:, None] * n + column[None, :], mask=inside, other=0.0)
    pivot, total, squares, absolute, low, high, nonzero, bad, held = _short_sums(
        v, n, within, inside, WORK
    )
    if WORK == tl.float32:
        if tl.sum((~held).to(tl.int32), 0) > 0:
            pivot, total, squares, absolute, low, high, nonzero, bad, held = _short_sums(
                v, n, within, inside, tl.float64
            )
    out = results + (tl.load(entry + 4) + place + row) * STATISTICS_
    tl.store(out, pivot, mask=within)
    tl.store(out + 1, total, mask=within)
    tl.store(out + 2, squares, mask=within)
    tl.store(out + 3, absolute, mask=within)
    tl.store(out + 4, low, mask=within)
    tl.store(out + 5, high, mask=within)
    tl.store(out + 6, nonzero, mask=within)
    tl.store(out + 7, bad, mask=within)
    if SAMPLED:
        _copy_samples(base, entry, samples, sample_place, WIDTH)


@triton.jit
def _store_moments(out, s, within, number):
    """Store the moments of one statistic for some rows."""
    mean = tl.sum(tl.where(within, s, 0.0), 0) / number
    off = tl.where(within, s - mean, 0.0)
    size = tl.where(within, tl.abs(s), 0.0)
    nans = tl.sum((size != size).to(tl.int32), 0)
    tl.store(out, number)
    tl.store(out + 1, mean)
    tl.store(out + 2, tl.sum(off * off, 0))
    tl.store(out + 3, tl.where(nans > 0, float("nan"), tl.max(size, 0)))


@triton.jit(do_not_specialize=["rows", "elements", "place"])
def row_moments(results, out, rows, elements, place, ROWS: tl.constexpr):
    """Each program reads the raw sums of up to `ROWS` samples.

    Args:
        results: float64 [rows, 8].
        out: float64 [., formulas, moments], written from `place` on, in the order of `FORMULAS`.
        rows: number of samples.
        elements: elements per sample.
        place: output index of the first program.
        ROWS: samples per program.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    within = row < rows
    number = tl.minimum(rows - program * ROWS, ROWS).to(tl.float64)
    n = elements.to(tl.float64)
    source = results + row.to(tl.int64) * STATISTICS_
    pivot = tl.load(source, mask=within, other=0.0)
    total = tl.load(source + 1, mask=within, other=0.0)
    squares = tl.load(source + 2, mask=within, other=0.0)
    absolute = tl.load(source + 3, mask=within, other=0.0)
    low = tl.load(source + 4, mask=within, other=0.0)
    high = tl.load(source + 5, mask=within, other=0.0)
    nonzero = tl.load(source + 6, mask=within, other=0.0)
    bad = tl.load(source + 7, mask=within, other=0.0)
    shift = total / n
    mean = pivot + shift
    variance = squares / n - shift * shift
    std = tl.sqrt(tl.where(variance < 0.0, 0.0, variance))
    energy = squares + pivot * (2.0 * total + n * pivot)
    energy = tl.where(squares == float("inf"), float("inf"), energy)
    norm = tl.sqrt(tl.where(energy < 0.0, 0.0, energy))
    to = out + (place + program).to(tl.int64) * (FORMULAS_ * MOMENTS_)
    _store_moments(to, mean, within, number)
    _store_moments(to + MOMENTS_, absolute / n, within, number)
    _store_moments(to + 2 * MOMENTS_, std, within, number)
    _store_moments(to + 3 * MOMENTS_, low, within, number)
    _store_moments(to + 4 * MOMENTS_, high, within, number)
    _store_moments(to + 5 * MOMENTS_, tl.where(-low > high, -low, high), within, number)
    _store_moments(to + 6 * MOMENTS_, norm, within, number)
    _store_moments(to + 7 * MOMENTS_, (n - nonzero) / n, within, number)
    _store_moments(to + 8 * MOMENTS_, bad, within, number)
    _store_moments(to + 9 * MOMENTS_, norm / tl.sqrt(n), within, number)
    _store_moments(to + 10 * MOMENTS_, tl.abs(mean) / std, within, number)
