"""Inputs that are not normalized."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Factor,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
)


class InputParameters(Patient):
    """The options of `input_scale`."""

    patience: Count = 3

    largest: Factor = 30.0
    """The largest mean magnitude allowed."""

    smallest: Fraction = 1e-3
    """The smallest mean magnitude allowed."""

    offset: Factor = 10.0
    """The largest mean allowed, in standard deviations."""


class InputScale(SlotRule):
    """Inputs that are not normalized."""

    name = "input_scale"
    certainty = 0.6
    definition = (
        "A floating-point input has a mean magnitude above `largest` or below `smallest`, or a "
        "mean of more than `offset` standard deviations, for `patience` records in a row."
    )
    source = (
        "SageMaker Debugger (|mean| > 0.2 for images); wider here, because pixels in 0 .. 1 train "
        "well. Pixels in 0 .. 255 do not pass."
    )
    advice = "Subtract the mean and divide by the standard deviation of the training data."
    explained_by = ("nonfinite",)
    Parameters = InputParameters
    statistics = ("abs_mean", "mean", "std")
    evidence = "mean magnitude"
    needs = "inputs of the model, which are recorded if `nodes` selects its root"

    def wants(self, table: SlotTable) -> Mask:
        """Returns inputs of the model."""
        return table.floating & table.where(
            lambda i: i.kind == "input" and i.key.pass_ == "forward" and i.batch_dim is not None
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares size and offset with the limits."""
        size = window.read("abs_mean", at).astype(np.float64)
        mean = np.abs(window.read("mean", at).astype(np.float64))
        # over all elements: within samples, and between their means
        spread = np.hypot(window.read("std", at), window.read("mean", at, "std"))
        parameters = self.parameters
        hit = (size > parameters.largest) | ((size < parameters.smallest) & (size > 0))
        return hit | ((mean > parameters.offset * spread) & (spread > 0)), size

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} is not normalized: its mean magnitude is "
            f"{self.streak.worst[slot]:.3g}."
        )
