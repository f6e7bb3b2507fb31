"""Downsampling of heat maps: selects the record for each column of a bounded image."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.model.runview import Steps
from comgra_decl.viewer.model.series import Floats, Window

COLUMNS = 360


def columns(
    steps: Steps, within: Window | None = None, *, most: int = COLUMNS
) -> tuple[float, float, NDArray[np.int64]]:
    """Return the extent in steps, and the record index of each column.

    The extent covers all records, or only a window if there are more than `most` records.
    """
    gaps = np.diff(steps)
    if len(steps) <= most and (len(gaps) == 0 or (gaps == gaps[0]).all()):
        half = float(gaps[0]) / 2 if len(gaps) else 0.5
        return float(steps[0]) - half, float(steps[-1]) + half, np.arange(len(steps))
    x0, x1 = float(steps[0]), float(steps[-1])
    if within is not None and max(x0, within[0]) < min(x1, within[1]):
        x0, x1 = max(x0, within[0]), min(x1, within[1])
    centres = x0 + (np.arange(most) + 0.5) * (x1 - x0) / most
    return x0, x1, np.searchsorted(steps, centres, side="right") - 1


def strongest(numbers: Floats, steps: Steps, x0: float, x1: float, count: int) -> NDArray[np.int64]:
    """Return the record whose value has the largest magnitude in each column, [lines, count].

    As a result, a single outlier among many steps remains visible. A column with no record repeats
    the previous record, which is -1 before the first.

    Args:
        numbers: Recorded values [lines, k]; NaN where missing.
        steps: Their steps, ascending [k].
        x0: Start of the first column.
        x1: End of the last column.
        count: Number of columns.
    """
    edges = np.linspace(x0, x1, count + 1)
    edges[-1] = np.nextafter(x1, np.inf)  # include the last step in the last column
    begin = np.searchsorted(steps, edges)
    found = np.repeat(begin[None, 1:] - 1, len(numbers), axis=0)
    size = np.where(np.isnan(numbers), -1.0, np.abs(numbers))
    for column in np.flatnonzero(np.diff(begin) > 1).tolist():
        first, last = begin[column], begin[column + 1]
        found[:, column] = first + size[:, first:last].argmax(1)
    return found


def taken(numbers: Floats, records: NDArray[np.int64]) -> Floats:
    """Return the values of records [lines, count]; NaN for record -1."""
    values: Floats = np.take_along_axis(numbers, np.maximum(records, 0), axis=1)
    return np.where(records < 0, np.nan, values)
