"""Sigmoids and tanhs that have come to their ends."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    predictions,
)


class SaturatedParameters(Patient):
    """What can be said of `saturated`."""

    slope: Fraction = 0.06
    """The mean slope is less than this share of the steepest one."""


class Saturated(SlotRule):
    """Sigmoids and tanhs that have come to their ends, where nothing is learned."""

    name = "saturated"
    certainty = 0.75
    definition = (
        "The mean slope of a Tanh or Sigmoid module, which follows from its output y as 1 - E[y^2] "
        "or 4 (E[y] - E[y^2]), relative to its steepest one, is below `slope` for `patience` "
        "records. What enters the loss may well be saturated, and is left out."
    )
    source = "|tanh| > 0.97 (Karpathy), which is where its slope is 0.06."
    advice = (
        "Make what enters smaller: smaller initial weights, a normalisation before it, inputs of "
        "unit variance, a lower learning rate; or use another activation function."
    )
    explained_by = ("nonfinite", "large_update", "input_scale")
    Parameters = SaturatedParameters
    statistics = ("mean", "l2")
    lowest, evidence = True, "relative slope"
    needs = "outputs of Tanh or Sigmoid modules"

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of Tanh and Sigmoid."""
        return table.outputs & table.where(lambda i: i.module_class in ("Tanh", "Sigmoid"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Computes the mean slope from the output."""
        square = window.read("l2", at).astype(np.float64) ** 2 / window.elements(at)
        mean = window.read("mean", at).astype(np.float64)
        tanh = window.table.remembered(Saturated, _tanh)[at]
        slope = np.where(tanh, 1 - square, 4 * (mean - square))
        return slope < self.parameters.slope, slope

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out what the network answers."""
        return fired[~np.isin(fired, list(predictions(scene)))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how flat it is."""
        return (
            f"{scene.table.place(slot)} is saturated: its mean slope is "
            f"{max(0.0, self.streak.worst[slot]):.2%} of the steepest."
        )


def _tanh(table: SlotTable) -> Mask:
    return table.where(lambda info: info.module_class == "Tanh")
