"""Tick positions of a logarithmic axis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_DECADES = (100, 50, 20, 10, 5, 2, 1)
_MANTISSAS = ((1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8))
_PARTS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return the decimal logarithms of as many round numbers as fit.

    Wide ranges get decades, or some of them; narrow ranges get steps of 1, 2, 5 or finer.

    Args:
        low: Logarithm of the axis start.
        high: Logarithm of the axis end, greater than `low`.
        most: Maximum number of ticks.
    """
    best = max(_fitting(_round(low, high), most), key=len)
    if len(best) < 2:
        best = max(_fitting(_even(low, high), most), key=len)
    return best


def _fitting(choices: Iterator[list[float]], most: int) -> list[list[float]]:
    return [[], *(ticks for ticks in choices if len(ticks) <= most)]


def _round(low: float, high: float) -> Iterator[list[float]]:
    """Yield decades with various spacings, then finer subdivisions."""
    decades = np.arange(np.ceil(low), np.floor(high) + 1)
    for step in _DECADES:
        yield decades[decades % step == 0].tolist()
    begun = np.arange(np.floor(low), np.floor(high) + 1)
    for mantissas in _MANTISSAS:
        marks = (begun[:, None] + np.log10(mantissas)).ravel()
        yield marks[(marks >= low) & (marks <= high)].tolist()


def _even(low: float, high: float) -> Iterator[list[float]]:
    """Yield evenly spaced numbers, for a range in which the logarithm is almost linear."""
    first, last = 10.0**low, 10.0**high
    if not 0 < first < last < np.inf:
        return
    size = int(np.floor(np.log10(last - first)))
    for step in (part * 10.0 ** (size + 1) for part in _PARTS):
        marks = np.arange(np.ceil(first / step), np.floor(last / step) + 1) * step
        yield np.log10(marks[marks > 0]).tolist()
