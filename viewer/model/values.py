"""Recorded values of the selected tensor at one step, as an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.numbers import count, shape
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection

PIXELS = 200_000
"""Maximum number of cells. Larger images show an evenly spaced subset, as stated in `facts`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ValuesPicture:
    """Values [rows, columns] with row 0 on top. Colours saturate at `limit`.

    `marks` [rows, columns] are the cells with NaN or infinity, and `broken` is their number. Cells
    between tiles are NaN but not marked. `facts` describes the image.
    """

    image: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    marks: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 1), bool))
    limit: float = 1.0
    facts: str = ""
    missing: str = ""

    @property
    def broken(self) -> int:
        """Number of displayed values that are NaN or infinite."""
        return int(self.marks.sum())


def values_picture(view: RunView, slot: Slot | None, at: Selection) -> ValuesPicture:
    """Returns the values of `slot` at the selected step: all samples, or the selected one."""
    if slot is None or at.step is None:
        return ValuesPicture(missing="Not recorded for this tensor.")
    try:
        values = np.asarray(view.value(slot, at.step, at.type))
    except ComgraError:
        return ValuesPicture(missing=_why_missing(view, slot, at))
    if values.size == 0:
        return ValuesPicture(missing="The tensor is empty at this step.")
    if slot.batch_dim is None:
        return _one(_numbers(values[0]))  # stored as a single sample
    if at.sample is None:
        rows = _numbers(values).reshape(len(values), -1)
        return _drawn(rows, f"sample \u00d7 element \u00b7 {shape(rows.shape)}")
    if at.sample >= len(values):
        return ValuesPicture(missing=f"Sample {at.sample} was not recorded at this step.")
    return _one(_numbers(values[at.sample]))


def _why_missing(view: RunView, slot: Slot, at: Selection) -> str:
    dims = [n for i, n in enumerate(view.shape(slot, at)) if i != slot.batch_dim]
    elements, limit = prod(dims), view.run.spec.values.max_elements
    if elements > limit:
        each = "" if slot.batch_dim is None else " per sample"
        return (
            f"The tensor has {count(elements)} values{each}, more than the spec keeps "
            f"(values.max_elements: {limit})."
        )
    return "No values recorded. Set `values: true` in this node's spec entry."


def _numbers(values: NDArray[Any]) -> Floats:
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)


def _one(values: Floats) -> ValuesPicture:
    """Returns the image of a tensor without a batch. Maps of three or more dims are tiled."""
    if values.ndim >= 3 and min(values.shape[-2:]) > 1:
        maps = values.reshape(-1, *values.shape[-2:])
        facts = f"{len(maps)} maps of {shape(maps.shape[1:])}"
        return _drawn(tiled(maps), facts, gaps=tiled(np.zeros(maps.shape)))
    flat = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    return _drawn(flat, f"row \u00d7 column \u00b7 {shape(values.shape)}")


def tiled(maps: Floats) -> Floats:
    """Returns maps [n, h, w] in reading order on a nearly square grid, separated by NaN."""
    n, h, w = maps.shape
    across = min(n, max(1, round(sqrt(n * (h + 1) / (w + 1)))))
    down = -(-n // across)
    sheet = np.full((down, across, h + 1, w + 1), np.nan)
    sheet.reshape(down * across, h + 1, w + 1)[:n, :h, :w] = maps
    joined = sheet.transpose(0, 2, 1, 3).reshape(down * (h + 1), across * (w + 1))
    return joined[:-1, :-1]


def _drawn(values: Floats, facts: str, *, gaps: Floats | None = None) -> ValuesPicture:
    marks = ~np.isfinite(values)
    if gaps is not None:
        marks &= ~np.isnan(gaps)
    stride = -(-values.size // PIXELS)
    if stride > 1:
        part = (slice(None), slice(None, None, stride))[:: 1 if values.shape[1] > stride else -1]
        values, marks = values[part], marks[part]
        facts += f", every {count(stride)}th"
    return ValuesPicture(values, marks, _limit(values), facts)


def _limit(values: Floats) -> float:
    """Returns a magnitude that only half a percent of the values exceed."""
    finite = np.abs(values[np.isfinite(values)])
    if not len(finite):
        return 1.0
    limit = float(np.quantile(finite, 0.995))
    return limit or float(finite.max()) or 1.0
