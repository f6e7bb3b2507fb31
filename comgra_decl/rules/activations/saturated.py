"""Saturated sigmoid and tanh units."""

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
    """Options of `saturated`."""

    slope: Fraction = 0.06
    """Smallest allowed mean slope, relative to the maximum slope."""


class Saturated(SlotRule):
    """Saturated sigmoid and tanh units, which barely learn."""

    name = "saturated"
    certainty = 0.75
    definition = (
        "For `patience` records in a row, the mean slope of a Tanh or Sigmoid module is below "
        "`slope` times its maximum slope. This ratio is computed from the output y: 1 - E[y^2] "
        "for Tanh, 4 (E[y] - E[y^2]) for Sigmoid. The model's predictions are ignored, because "
        "they may saturate."
    )
    source = "Karpathy, who counts units with |tanh| > 0.97, where the slope is 0.06."
    advice = (
        "Reduce the magnitude of the inputs: use smaller initial weights, a normalization layer "
        "before the activation, inputs with unit variance, or a lower learning rate. "
        "Alternatively, use another activation function."
    )
    explained_by = (
        "nonfinite",
        "large_update",
        "input_scale",
        "unscaled_attention",
        "bounded_answer",
    )
    Parameters = SaturatedParameters
    of_state = True
    statistics = ("mean", "l2")
    lowest, evidence = True, "relative slope"
    needs = "outputs of Tanh or Sigmoid modules"

    def wants(self, table: SlotTable) -> Mask:
        """Return the outputs of Tanh and Sigmoid modules."""
        return table.outputs & table.where(lambda i: i.module_class in ("Tanh", "Sigmoid"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the mean slope, computed from the output."""
        square = window.read("l2", at).astype(np.float64) ** 2 / window.elements(at)
        mean = window.read("mean", at).astype(np.float64)
        tanh = window.table.remembered(Saturated, _tanh)[at]
        slope = np.where(tanh, 1 - square, 4 * (mean - square))
        return slope < self.parameters.slope, slope

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out the model's predictions."""
        return fired[~np.isin(fired, list(predictions(scene)))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is saturated: its mean slope is "
            f"{max(0.0, self.streak.worst[slot]):.2%} of the maximum slope."
        )


def _tanh(table: SlotTable) -> Mask:
    return table.where(lambda info: info.module_class == "Tanh")
