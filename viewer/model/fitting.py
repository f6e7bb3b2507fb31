"""The statistic to show first, chosen to fit the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from comgra_decl.viewer.model.runview import RunView, Slot

GENERAL = "std", "mean"
"""Statistic and aggregate shown first where all tensors are compared (heat maps, graph colours).

The spread within a sample distinguishes dead, exploding and healthy tensors of any kind."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A statistic of the values of a sample, its aggregate over the batch, and the reason."""

    statistic: str
    batch: str
    why: str


_LOSS = Fitting("mean", "mean", "a loss is shown as its value")
_ONE = Fitting("mean", "mean", "the tensor has a single value")
_ONE_EACH = Fitting(
    "mean", "std", "each sample has a single value, so the spread over the batch is shown"
)
_MANY = Fitting(*GENERAL, "each sample has several values")


def fitting(view: RunView, slot: Slot | None) -> Fitting:
    """Return what to show for a tensor until the user makes a choice.

    For a loss or any other single number, this is the mean. If each sample contains one value
    (shape [B] or [B, 1]), it is the spread over the batch, because the spread within a sample is
    always 0. For all other tensors, it is the spread of the values in a sample. If none of these is
    recorded, it is the first recorded statistic.
    """
    fit = _MANY if slot is None else _fit(slot)
    known = view.run.statistics
    if fit.statistic in known:
        return fit
    general = next((name for name in (*GENERAL, *known) if name in known), "")
    return Fitting(general, "mean", "the run has no statistic that fits better")


def _fit(slot: Slot) -> Fitting:
    if slot.kind == "loss":
        return _LOSS
    batch = slot.batch_dim
    each = [size for dim, size in enumerate(slot.shape) if dim != batch]
    if math.prod(each) != 1:
        return _MANY
    return _ONE if batch is None else _ONE_EACH
