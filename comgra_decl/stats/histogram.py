"""Counting the sampled elements of many tensors and steps into bins, in a few numpy calls."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
_NARROW, _WIDE = 1e-30, 1e37  # ranges in between can be scaled in float32
_ELEMENTS = 1 << 19  # of several steps that are looked at together
_PIECE = 1 << 17  # binned at a time, so that intermediate arrays stay in the cache


class Counter:
    """Histograms of the tensors of one layout.

    The bins of a tensor are equally wide between the lowest and the highest finite element *of
    the sample*; the last one includes its upper edge, and elements at an edge fall on either side
    as float32 rounds. Counts are of sampled elements: they add up to the number of finite ones.
    If all of them are equal, both edges are that value and the first bin counts them all; if there
    is none, the edges are NaN and all counts 0.

    Args:
        starts: int64 [tensors + 1], where each tensor's elements lie in a step's sample.
        bins: number of bins.
    """

    def __init__(self, starts: NDArray[np.int64], bins: int) -> None:
        self._starts = starts
        self._bins = bins
        sizes = np.diff(starts)
        self._filled = np.flatnonzero(sizes)
        self._first = starts[self._filled].astype(np.intp)
        cuts = np.flatnonzero(np.diff(sizes[self._filled])) + 1
        edges = [0, *cuts.tolist(), len(self._filled)] if len(self._filled) else []
        # neighbours with equally many elements are one three-dimensional array
        self._runs = [(a, b, int(sizes[self._filled[a]])) for a, b in pairwise(edges)]

    def __call__(self, samples: list[Samples]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Returns, for k steps, counts [k, tensors, bins] and ranges [k, tensors, 2]."""
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
        """Returns the counts [k, tensors, bins] of bin numbers [k, tensors, size]."""
        steps, tensors, _ = binned.shape
        stride = self._bins + 1  # one more bin per tensor takes what is not finite
        buckets = np.arange(0, steps * tensors * stride, stride, dtype=np.int32)
        binned += buckets.reshape(steps, tensors, 1)
        counted = np.bincount(binned.ravel(), minlength=steps * tensors * stride)
        return counted.reshape(steps, tensors, stride)[..., : self._bins]

    def _edges(self, part: Samples) -> tuple[Samples, bool]:
        """Returns lowest and highest finite elements [k, filled, 2]; whether any is not finite."""
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
        """Returns the bin of each element [k, run, size]; `bins` for those that are not finite."""
        low, high = edges[..., 0, None], edges[..., 1, None]
        with np.errstate(all="ignore"):
            width = high.astype(np.float64) - low
            usual = (width == 0.0) | ((width > _NARROW) & (width < _WIDE)) | np.isnan(width)
            precision = np.float32 if usual.all() else np.float64
            # a hair less than the bins, so that the highest element stays in the last one
            scale = np.where(width > 0.0, self._bins * (1.0 - 2.0**-22) / width, 0.0)
            position = np.subtract(x, low, dtype=precision)
            position *= scale.astype(precision)
            if wild:
                position[~(position < self._bins)] = self._bins
                position[~np.isfinite(x)] = self._bins
            return position.astype(np.int32)
