"""Values of the selected tensor at one step, or a preview, drawn according to their axes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query import Preview
from comgra_decl.viewer.model.drawing import Drawing, draw, draw_tokens, limit_of, numbers
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.tokens import has_tokens, labels

_SCALED = 5
"""Number of steps, evenly spaced, whose values determine the colour scale of all steps."""


_COMPARED, _FAR = 3, 3.0
"""Smallest number of samples for comparing values; deviation at which colours saturate."""

_TOO_FEW = (
    "Comparing values requires at least three samples. Choose recorded values, or record more "
    "samples: `samples: {count: 8}` and `values: true` in the spec."
)


def _nothing() -> Drawing:
    return Drawing("map", np.zeros((1, 1)), "")


@dataclass(frozen=True, slots=True)
class ValuesPicture:
    """A drawing of values; `limit` is where the colours saturate, the same at all steps.

    `step` is the step of the record with the values; `whole` is False for a preview.
    `relative`: the values are standard deviations from the mean of the samples.
    """

    drawing: Drawing = field(default_factory=_nothing)
    limit: float = 1.0
    step: int | None = None
    whole: bool = True
    missing: str = ""
    relative: bool = False

    @property
    def broken(self) -> int:
        """Number of displayed values that are NaN or infinite."""
        return int(self.drawing.marks.sum())


def values_picture(
    view: RunView, slot: Slot | None, at: Selection, *, relative: bool = False
) -> ValuesPicture:
    """Return the values of `slot` at the selected step: all samples, or the selected one.

    If `relative`, each value is compared with the same value of the other samples.
    """
    if slot is None or at.step is None:
        return ValuesPicture(missing="Not recorded for this tensor.")
    try:
        preview = view.preview(slot, at.step, at.type)
    except ComgraError:
        return ValuesPicture(missing=_why_missing(view, slot, at))
    if preview.values.size == 0:
        return ValuesPicture(missing="The tensor is empty at this step.")
    batched = slot.batch_dim is not None
    if batched and at.sample is not None and at.sample >= len(preview.values):
        return ValuesPicture(missing=_no_sample(at.sample, preview))
    sample = at.sample if batched else None
    if relative and batched:
        if len(preview.values) < _COMPARED:
            return ValuesPicture(missing=_TOO_FEW)
        compared = replace(preview, values=standardised(preview.values), image=None)
        drawing = draw(compared, sample=sample)
        return ValuesPicture(drawing, _FAR, preview.step, preview.whole, relative=True)
    if has_tokens(view, slot):
        spelled_out = draw_tokens(preview, partial(labels, view), sample)
        if spelled_out is not None:
            pale = 3 * limit_of(numbers(preview.values))  # colours must not hide the letters
            return ValuesPicture(spelled_out, pale, preview.step, preview.whole)
    drawing = draw(preview, sample=sample, picture=slot.kind == "input")
    limit = max(_scale(view, slot, at), 0.0) or limit_of(numbers(preview.values))
    return ValuesPicture(drawing, limit, preview.step, preview.whole)


def standardised(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return (value - mean) / standard deviation over the samples, [samples, ...].

    The mean and the deviation (of the population) are those of the same value in all recorded
    samples. Values in which the samples agree are 0.
    """
    exact = numbers(values)
    with np.errstate(invalid="ignore"):
        away = exact - exact.mean(0)
        spread = exact.std(0)
    out: NDArray[np.float64] = np.where(np.isfinite(away), 0.0, away)
    np.divide(away, spread, out=out, where=spread > 0)
    return out


def _scale(view: RunView, slot: Slot, at: Selection) -> float:
    """Return the largest limit over some steps, which are spread over the whole run."""

    def read() -> float:
        steps = view.steps(at.type)
        places = np.unique(np.linspace(0, len(steps) - 1, _SCALED).round().astype(int))
        limits: dict[int, float] = {}
        for step in steps[places].tolist():
            try:
                preview = view.preview(slot, step, at.type)
            except ComgraError:
                continue
            if preview.step not in limits:
                limits[preview.step] = limit_of(numbers(preview.values))
        return max(limits.values(), default=0.0)

    return view.now(("values scale", slot.id, at.type), read)


def _no_sample(sample: int, preview: Preview) -> str:
    if preview.whole:
        return f"Sample {sample} was not recorded at this step."
    kept = len(preview.values)
    held = "only sample 0" if kept == 1 else f"only samples 0 to {kept - 1}"
    return (
        f"The preview contains {held}. To record more, set `values: true` in this node's spec "
        "entry."
    )


def _why_missing(view: RunView, slot: Slot, at: Selection) -> str:
    dims = [n for i, n in enumerate(view.shape(slot, at)) if i != slot.batch_dim]
    elements, limit = prod(dims), view.spec.values.max_elements
    if elements > limit:
        each = "" if slot.batch_dim is None else " per sample"
        return (
            f"The tensor has {count(elements)} values{each}, more than the spec keeps "
            f"(values.max_elements: {limit})."
        )
    return "No values recorded. Set `values: true` in this node's spec entry."
