"""A metric over a whole run, in constant memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCKS = 128
"""Number of blocks after a merge; twice as many blocks are merged in pairs."""


class Curve:
    """Mean, deviation and extremes of a metric, in blocks with equal numbers of values.

    Requires constant memory. The blocks depend only on the values, not on how they are divided.
    """

    def __init__(self) -> None:
        self.size = 1
        """Number of values in a block."""
        self.count = 0
        """Number of finite values so far."""
        self.first = float("nan")
        """The first value."""
        self.steps: list[int] = []
        """The first step of each complete block."""
        self._sums: list[tuple[float, float, float, float]] = []  # sum, sum of squares, min, max
        self._open: list[tuple[int, float]] = []

    def add(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add the next values; ignores non-finite ones."""
        finite = np.isfinite(values)
        if not self.count and finite.any():
            self.first = float(values[finite][0])
        self.count += int(finite.sum())
        self._open += zip(steps[finite].tolist(), values[finite].tolist(), strict=True)
        start = 0
        while len(self._open) - start >= self.size:
            part = self._open[start : start + self.size]
            start += self.size
            self._close(part)
        del self._open[:start]

    def _close(self, part: list[tuple[int, float]]) -> None:
        values = np.array([value for _, value in part])
        self.steps.append(part[0][0])
        sums = values.sum(), (values**2).sum(), values.min(), values.max()
        self._sums.append((float(sums[0]), float(sums[1]), float(sums[2]), float(sums[3])))
        if len(self._sums) == 2 * BLOCKS:
            self._sums = [_joined(a, b) for a, b in zip(*[iter(self._sums)] * 2, strict=True)]
            self.steps = self.steps[::2]
            self.size *= 2

    @property
    def table(self) -> NDArray[np.float64]:
        """Sum, sum of squares, minimum and maximum of each complete block, of shape [blocks, 4]."""
        return np.array(self._sums).reshape(-1, 4)

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean of each complete block."""
        return self.table[:, 0] / self.size

    def mean(self, start: float, stop: float) -> tuple[float, float]:
        """Return the mean and standard error of the curve between two fractions of its length."""
        blocks = len(self._sums)
        first, last = int(start * blocks), max(int(start * blocks) + 1, int(stop * blocks))
        part = self.table[first:last]
        if not len(part):
            return float("nan"), float("nan")
        number = len(part) * self.size
        mean = part[:, 0].sum() / number
        variance = max(0.0, part[:, 1].sum() / number - mean**2)
        return float(mean), float(np.sqrt(variance / number))


def _joined(
    a: tuple[float, float, float, float], b: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    return a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3])
