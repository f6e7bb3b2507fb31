"""The recorded values of the selected tensor at one step, as a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.model.numbers import count, shape
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection

PIXELS = 200_000
"""Pictures with more cells show an evenly spaced part of them and say so."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ValuesPicture:
    """Values [rows, columns], drawn with row 0 on top; `limit` is where the colours saturate.

    `broken` counts NaN and infinities; `facts` says what the picture shows.
    """

    image: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    limit: float = 1.0
    y_label: str = ""
    x_label: str = ""
    broken: int = 0
    facts: str = ""
    missing: str = ""


def values_picture(view: RunView, slot: Slot | None, at: Selection) -> ValuesPicture:
    """Returns what was recorded of `slot` at the selected step: all samples, or the chosen one."""
    if slot is None or at.step is None:
        return ValuesPicture(missing="Not recorded for this tensor.")
    try:
        values = np.asarray(view.value(slot, at.step, at.type))
    except ComgraError:
        return ValuesPicture(missing=_why_missing(view, slot))
    if values.size == 0:
        return ValuesPicture(missing="The tensor is empty at this step.")
    if slot.batch_dim is None:
        return _drawn(_numbers(values[0]), "row", "column")  # counts as one sample
    if at.sample is None:
        return _drawn(_numbers(values).reshape(len(values), -1), "sample", "element")
    if at.sample >= len(values):
        return ValuesPicture(missing=f"Sample {at.sample} was not recorded at this step.")
    return _drawn(_numbers(values[at.sample]), "row", "column")


def _why_missing(view: RunView, slot: Slot) -> str:
    dims = [n for i, n in enumerate(slot.shape) if i != slot.batch_dim]
    elements, limit = prod(dims), view.run.spec.values.max_elements
    if elements > limit:
        each = "" if slot.batch_dim is None else " per sample"
        return (
            f"{count(elements)} values{each} are more than the spec keeps "
            f"(values.max_elements: {limit})."
        )
    return "No values were recorded here. Set `values: true` in the spec's entry for this node."


def _numbers(values: NDArray[Any]) -> Floats:
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)


def _drawn(values: Floats, y_label: str, x_label: str) -> ValuesPicture:
    facts = shape(values.shape)
    flat = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    broken = int((~np.isfinite(flat)).sum())
    stride = -(-flat.size // PIXELS)
    if stride > 1:
        flat = flat[:, ::stride]
        facts += f", every {count(stride)}th {x_label}"
    return ValuesPicture(flat, _limit(flat), y_label, x_label, broken, facts)


def _limit(values: Floats) -> float:
    """Returns a magnitude that only the outermost half percent of the values exceeds."""
    finite = np.abs(values[np.isfinite(values)])
    if not len(finite):
        return 1.0
    limit = float(np.quantile(finite, 0.995))
    return limit or float(finite.max()) or 1.0
