"""Bin sampled elements of many tensors and steps.

Uses a compiled kernel, which releases Python's lock while it counts, so that training continues in
parallel. If the kernel cannot be compiled, a few numpy calls give the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from string import Template

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import STEEPNESS, Spacing, bends
from comgra_decl.stats.kernel import address_of, constant

Samples = NDArray[np.float32]
_NARROW, _WIDE = 1e-30, 1e37  # ranges in between fit float32 arithmetic
_HAIR_LESS = 1.0 - 2.0**-22
_ELEMENTS = 1 << 19  # elements of several steps processed together
_PIECE = 1 << 17  # elements binned at a time, so that intermediates stay in cache


class Counter:
    """Histograms of the tensors in one layout.

    The bins of a tensor lie between the lowest and the highest finite element *of the sample*; see
    `comgra_decl.bins` for their edges. The last bin includes its upper edge. Elements at other
    edges fall on either side, depending on float32 rounding. Only sampled elements are counted, and
    the counts add up to the number of finite ones. If all finite elements are equal, both edges are
    that value, and the first bin counts all of them. If there are no finite elements, the edges are
    NaN and all counts are 0.

    Args:
        starts: int64 [tensors + 1]; the elements of tensor i are `starts[i]:starts[i + 1]` of a
            step's sample.
        bins: number of bins.
        spacing: their spacing.
    """

    def __init__(self, starts: NDArray[np.int64], bins: int, spacing: Spacing = "linear") -> None:
        self._starts = starts
        self._bins = bins
        self._spacing = spacing
        self._sizes = sizes = np.diff(starts)
        self._filled = np.flatnonzero(sizes)
        self._first = starts[self._filled].astype(np.intp)
        cuts = np.flatnonzero(np.diff(sizes[self._filled])) + 1
        edges = [0, *cuts.tolist(), len(self._filled)] if len(self._filled) else []
        # neighbours with equally many elements are one three-dimensional array
        self._runs = [(a, b, int(sizes[self._filled[a]])) for a, b in pairwise(edges)]
        self._addresses = np.ascontiguousarray(starts, np.int64)

    def __call__(self, samples: list[Samples]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return counts [k, tensors, bins] and ranges [k, tensors, 2] for k steps.

        Args:
            samples: per step, the concatenated elements of all tensors.
        """
        kernel = histogram_kernel()
        if self._spacing == "linear":
            return self._count_evenly(kernel, samples)
        bent, ranges = zip(*map(self._bend, samples), strict=True)
        return self._count_evenly(kernel, [*bent])[0], np.stack(ranges)

    def _count_evenly(
        self, kernel: _Kernel | None, samples: list[Samples]
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        return self.by_numpy(samples) if kernel is None else self.by_kernel(kernel, samples)

    def _bend(self, sample: Samples) -> tuple[Samples, Samples]:
        """Return a step's elements, transformed so that their bins are equally wide, and ranges."""
        ranges = np.full((len(self._sizes), 2), np.nan, np.float32)
        if not self._runs:
            return sample, ranges
        ranges[self._filled] = self._edges(sample[None])[0][0]
        low, high = ranges[:, 0], ranges[:, 1]
        curved = bends(low, high, self._spacing)
        if not curved.any():
            return sample, ranges
        with np.errstate(all="ignore"):
            largest = np.maximum(np.abs(low), np.abs(high)).astype(np.float64)
            scale = np.where(curved, STEEPNESS / largest, 1.0).astype(np.float32)
            bent = sample * np.repeat(scale, self._sizes)
            np.arcsinh(bent, out=bent, where=np.repeat(curved, self._sizes))
        return bent, ranges

    def by_kernel(
        self, kernel: _Kernel, samples: list[Samples]
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Compute the same with the compiled kernel."""
        tensors = len(self._starts) - 1
        # an extra bin per tensor counts non-finite elements
        counts = np.zeros((len(samples), tensors, self._bins + 1), np.uint32)
        ranges = np.full((len(samples), tensors, 2), np.nan, np.float32)
        starts = self._addresses.ctypes.data
        for sample, count, limits in zip(samples, counts, ranges, strict=True):
            x = np.ascontiguousarray(sample, np.float32)
            kernel(
                x.ctypes.data, starts, tensors, self._bins, count.ctypes.data, limits.ctypes.data
            )
        return np.ascontiguousarray(counts[..., : self._bins]), ranges

    def by_numpy(self, samples: list[Samples]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Compute the same with numpy."""
        tensors = len(self._starts) - 1
        counts = np.zeros((len(samples), tensors, self._bins), np.uint32)
        ranges = np.full((len(samples), tensors, 2), np.nan, np.float32)
        size = max(1, _ELEMENTS // max(1, int(self._starts[-1])))
        for start in range(0, len(samples) if self._runs else 0, size):
            part = np.stack(samples[start : start + size])
            span = slice(start, start + len(part))
            counts[span, self._filled], ranges[span, self._filled] = self._count(part)
        return counts, ranges

    def _count(self, part: Samples) -> tuple[NDArray[np.uint32], Samples]:
        edges, wild = self._edges(part)
        counts = np.empty((*edges.shape[:2], self._bins), np.uint32)
        for first, last, size in self._runs:
            tensors = max(1, _PIECE // (len(part) * size))
            for a in range(first, last, tensors):
                b = min(a + tensors, last)
                x = part[:, self._first[a] : self._first[a] + (b - a) * size]
                x = x.reshape(len(part), b - a, size)
                counts[:, a:b] = self._bincount(self._bin(x, edges[:, a:b], wild))
        return counts, edges

    def _bincount(self, binned: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the counts [k, tensors, bins] of bin numbers [k, tensors, size]."""
        steps, tensors, _ = binned.shape
        stride = self._bins + 1  # an extra bin per tensor counts non-finite elements
        buckets = np.arange(0, steps * tensors * stride, stride, dtype=np.int32)
        binned += buckets.reshape(steps, tensors, 1)
        counted = np.bincount(binned.ravel(), minlength=steps * tensors * stride)
        return counted.reshape(steps, tensors, stride)[..., : self._bins]

    def _edges(self, part: Samples) -> tuple[Samples, bool]:
        """Return finite minima and maxima [k, filled, 2]; whether any element is non-finite."""
        low = np.minimum.reduceat(part, self._first, axis=1)
        high = np.maximum.reduceat(part, self._first, axis=1)
        wild = np.argwhere(~np.isfinite(low) | ~np.isfinite(high))
        for step, i in wild:
            tensor = self._filled[i]
            mine = part[step, self._starts[tensor] : self._starts[tensor + 1]]
            finite = mine[np.isfinite(mine)]
            low[step, i] = finite.min() if finite.size else np.nan
            high[step, i] = finite.max() if finite.size else np.nan
        return np.stack((low, high), -1), len(wild) > 0

    def _bin(self, x: Samples, edges: Samples, wild: bool) -> NDArray[np.int32]:
        """Return the bin of each element [k, run, size]; `bins` for non-finite ones."""
        low, high = edges[..., 0, None], edges[..., 1, None]
        with np.errstate(all="ignore"):
            width = high.astype(np.float64) - low
            usual = (width == 0.0) | ((width > _NARROW) & (width < _WIDE)) | np.isnan(width)
            # slightly less than the bins, so that the maximum falls into the last bin
            scale = np.where(width > 0.0, self._bins * _HAIR_LESS / width, 0.0)
            position = np.subtract(x, low, dtype=np.float32)
            position *= scale.astype(np.float32)
            if wild:
                position[~(position < self._bins)] = self._bins
                position[~np.isfinite(x)] = self._bins
            binned = position.astype(np.int32)
            for at in map(tuple, np.argwhere(~usual[..., 0])):
                exact = (x[at].astype(np.float64) - low[at]) * scale[at]
                exact[~np.isfinite(x[at])] = self._bins
                binned[at] = exact
            return binned


_Kernel = Callable[[int, int, int, int, int, int], None]
"""(addresses of a step's sample, of int64 starts [tensors + 1]; tensors; bins; addresses of zeroed
uint32 counts [tensors, bins + 1], of float32 ranges [tensors, 2])."""

_LANES = 16

_ASSEMBLY = """
declare float @llvm.vector.reduce.fmin.v${W}f32(<$W x float>)
declare float @llvm.vector.reduce.fmax.v${W}f32(<$W x float>)
declare i32 @llvm.umin.i32(i32, i32)
declare <$W x i32> @llvm.umin.v${W}i32(<$W x i32>, <$W x i32>)

define void @histograms(ptr noalias %samples, ptr noalias %starts, i64 %tensors, i64 %bins,
                        ptr noalias %all, ptr noalias %ranges) {
entry:
  %bins.int = trunc i64 %bins to i32
  %bins.one = insertelement <$W x i32> poison, i32 %bins.int, i32 0
  %bins.all = shufflevector <$W x i32> %bins.one, <$W x i32> poison, <$W x i32> zeroinitializer
  %bins.double = sitofp i64 %bins to double
  %bins.less = fmul double %bins.double, $less
  %high.one = insertelement <$W x float> poison, float $infinity, i32 0
  %high.all = shufflevector <$W x float> %high.one, <$W x float> poison, <$W x i32> zeroinitializer
  %low.all = fneg <$W x float> %high.all
  %low.least = fneg float $infinity
  %width.row = add i64 %bins, 1
  br label %tensor

tensor:
  %t = phi i64 [ 0, %entry ], [ %t.next, %next ]
  %t.more = icmp slt i64 %t, %tensors
  br i1 %t.more, label %begin, label %exit
begin:
  %start.at = getelementptr i64, ptr %starts, i64 %t
  %start = load i64, ptr %start.at, align 8
  %stop.at = getelementptr i64, ptr %start.at, i64 1
  %stop = load i64, ptr %stop.at, align 8
  %n = sub i64 %stop, %start
  %n.whole = and i64 %n, -$W
  %data = getelementptr float, ptr %samples, i64 %start
  %row = mul i64 %t, %width.row
  %counts = getelementptr i32, ptr %all, i64 %row
  br label %ends

; the lowest and the highest finite element
ends:
  %i = phi i64 [ 0, %begin ], [ %i.next, %ends.body ]
  %lows = phi <$W x float> [ %high.all, %begin ], [ %lows.next, %ends.body ]
  %highs = phi <$W x float> [ %low.all, %begin ], [ %highs.next, %ends.body ]
  %i.more = icmp slt i64 %i, %n.whole
  br i1 %i.more, label %ends.body, label %ends.lanes
ends.body:
  %v.at = getelementptr float, ptr %data, i64 %i
  %v = load <$W x float>, ptr %v.at, align 4
  %v.zero = fsub <$W x float> %v, %v
  %v.finite = fcmp oeq <$W x float> %v.zero, zeroinitializer
  %v.low = select <$W x i1> %v.finite, <$W x float> %v, <$W x float> %high.all
  %v.high = select <$W x i1> %v.finite, <$W x float> %v, <$W x float> %low.all
  %v.less = fcmp olt <$W x float> %v.low, %lows
  %lows.next = select <$W x i1> %v.less, <$W x float> %v.low, <$W x float> %lows
  %v.more = fcmp ogt <$W x float> %v.high, %highs
  %highs.next = select <$W x i1> %v.more, <$W x float> %v.high, <$W x float> %highs
  %i.next = add nuw nsw i64 %i, $W
  br label %ends
ends.lanes:
  %low.lanes = call float @llvm.vector.reduce.fmin.v${W}f32(<$W x float> %lows)
  %high.lanes = call float @llvm.vector.reduce.fmax.v${W}f32(<$W x float> %highs)
  br label %ends.tail
ends.tail:
  %j = phi i64 [ %n.whole, %ends.lanes ], [ %j.next, %ends.tail.body ]
  %low = phi float [ %low.lanes, %ends.lanes ], [ %low.next, %ends.tail.body ]
  %high = phi float [ %high.lanes, %ends.lanes ], [ %high.next, %ends.tail.body ]
  %j.more = icmp slt i64 %j, %n
  br i1 %j.more, label %ends.tail.body, label %ended
ends.tail.body:
  %s.at = getelementptr float, ptr %data, i64 %j
  %s = load float, ptr %s.at, align 4
  %s.zero = fsub float %s, %s
  %s.finite = fcmp oeq float %s.zero, 0.0
  %s.less = fcmp olt float %s, %low
  %s.lower = and i1 %s.finite, %s.less
  %low.next = select i1 %s.lower, float %s, float %low
  %s.more = fcmp ogt float %s, %high
  %s.higher = and i1 %s.finite, %s.more
  %high.next = select i1 %s.higher, float %s, float %high
  %j.next = add nuw nsw i64 %j, 1
  br label %ends.tail

ended:
  %any = fcmp ole float %low, %high
  br i1 %any, label %scaled, label %next
scaled:
  %range = mul i64 %t, 2
  %low.at = getelementptr float, ptr %ranges, i64 %range
  store float %low, ptr %low.at, align 4
  %high.at = getelementptr float, ptr %low.at, i64 1
  store float %high, ptr %high.at, align 4
  %low.wide = fpext float %low to double
  %high.wide = fpext float %high to double
  %width = fsub double %high.wide, %low.wide
  %wide = fcmp ogt double %width, 0.0
  %quotient = fdiv double %bins.less, %width
  %scale.wide = select i1 %wide, double %quotient, double 0.0
  %scale = fptrunc double %scale.wide to float
  %equal = fcmp oeq double %width, 0.0
  %above = fcmp ogt double %width, $narrow
  %below = fcmp olt double %width, $wide
  %between = and i1 %above, %below
  %usual = or i1 %equal, %between
  br i1 %usual, label %usually, label %exactly

usually:
  %l.one = insertelement <$W x float> poison, float %low, i32 0
  %l.all = shufflevector <$W x float> %l.one, <$W x float> poison, <$W x i32> zeroinitializer
  %f.one = insertelement <$W x float> poison, float %scale, i32 0
  %f.all = shufflevector <$W x float> %f.one, <$W x float> poison, <$W x i32> zeroinitializer
  br label %count
count:
  %k = phi i64 [ 0, %usually ], [ %k.next, %count.body ]
  %k.more = icmp slt i64 %k, %n.whole
  br i1 %k.more, label %count.body, label %count.tail
count.body:
  %w.at = getelementptr float, ptr %data, i64 %k
  %w = load <$W x float>, ptr %w.at, align 4
  %w.zero = fsub <$W x float> %w, %w
  %w.finite = fcmp oeq <$W x float> %w.zero, zeroinitializer
  %w.safe = select <$W x i1> %w.finite, <$W x float> %w, <$W x float> %l.all
  %w.off = fsub <$W x float> %w.safe, %l.all
  %w.position = fmul <$W x float> %w.off, %f.all
  %w.int = fptosi <$W x float> %w.position to <$W x i32>
  %w.held = call <$W x i32> @llvm.umin.v${W}i32(<$W x i32> %w.int, <$W x i32> %bins.all)
  %w.bin = select <$W x i1> %w.finite, <$W x i32> %w.held, <$W x i32> %bins.all
$increments
  %k.next = add nuw nsw i64 %k, $W
  br label %count
count.tail:
  %m = phi i64 [ %n.whole, %count ], [ %m.next, %count.tail.body ]
  %m.more = icmp slt i64 %m, %n
  br i1 %m.more, label %count.tail.body, label %next
count.tail.body:
  %u.at = getelementptr float, ptr %data, i64 %m
  %u = load float, ptr %u.at, align 4
  %u.zero = fsub float %u, %u
  %u.finite = fcmp oeq float %u.zero, 0.0
  %u.safe = select i1 %u.finite, float %u, float %low
  %u.off = fsub float %u.safe, %low
  %u.position = fmul float %u.off, %scale
  %u.int = fptosi float %u.position to i32
  %u.held = call i32 @llvm.umin.i32(i32 %u.int, i32 %bins.int)
  %u.bin = select i1 %u.finite, i32 %u.held, i32 %bins.int
  %u.place = getelementptr i32, ptr %counts, i32 %u.bin
  %u.old = load i32, ptr %u.place, align 4
  %u.new = add i32 %u.old, 1
  store i32 %u.new, ptr %u.place, align 4
  %m.next = add nuw nsw i64 %m, 1
  br label %count.tail

; ranges whose scale no float32 holds
exactly:
  %e = phi i64 [ 0, %scaled ], [ %e.next, %exactly.body ]
  %e.more = icmp slt i64 %e, %n
  br i1 %e.more, label %exactly.body, label %next
exactly.body:
  %x.at = getelementptr float, ptr %data, i64 %e
  %x = load float, ptr %x.at, align 4
  %x.zero = fsub float %x, %x
  %x.finite = fcmp oeq float %x.zero, 0.0
  %x.safe = select i1 %x.finite, float %x, float %low
  %x.wide = fpext float %x.safe to double
  %x.off = fsub double %x.wide, %low.wide
  %x.position = fmul double %x.off, %scale.wide
  %x.int = fptosi double %x.position to i32
  %x.held = call i32 @llvm.umin.i32(i32 %x.int, i32 %bins.int)
  %x.bin = select i1 %x.finite, i32 %x.held, i32 %bins.int
  %x.place = getelementptr i32, ptr %counts, i32 %x.bin
  %x.old = load i32, ptr %x.place, align 4
  %x.new = add i32 %x.old, 1
  store i32 %x.new, ptr %x.place, align 4
  %e.next = add nuw nsw i64 %e, 1
  br label %exactly

next:
  %t.next = add nuw nsw i64 %t, 1
  br label %tensor
exit:
  ret void
}
"""

_INCREMENT = """\
  %b$i = extractelement <$W x i32> %w.bin, i32 $i
  %p$i = getelementptr i32, ptr %counts, i32 %b$i
  %o$i = load i32, ptr %p$i, align 4
  %c$i = add i32 %o$i, 1
  store i32 %c$i, ptr %p$i, align 4"""


@cache
def histogram_kernel() -> _Kernel | None:
    """Return the kernel, compiled on the first call; None if it cannot be compiled."""
    increment = Template(_INCREMENT)
    assembly = Template(_ASSEMBLY).substitute(
        W=_LANES,
        increments="\n".join(increment.substitute(W=_LANES, i=i) for i in range(_LANES)),
        less=constant(_HAIR_LESS),
        infinity=constant(float("inf")),
        narrow=constant(_NARROW),
        wide=constant(_WIDE),
    )
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    signature = ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64, pointer, pointer)
    try:
        kernel: _Kernel = signature(address_of(assembly, "histograms"))
    except Exception:  # noqa: BLE001 - a compiler can fail in any way; numpy is used instead
        return None
    return kernel
