"""Weights that keep growing."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Early,
    Factor,
    Largest,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    decays,
    lower_rate,
    per_run,
    usual_norm,
)

_TINY = 3e-3  # weights with a smaller root mean square are treated as initialized to zero


class GrowingParameters(Patient):
    """Options of `growing_weight`."""

    patience: Count = 3

    growth: Factor = 10.0
    """Largest allowed norm of a weight, as a multiple of its initial norm."""


class GrowingWeight(SlotRule):
    """Weights that keep growing."""

    name = "growing_weight"
    certainty = 0.55
    definition = (
        "For `patience` records in a row, the l2 norm of a weight exceeds both `growth` times "
        "its first value and `growth` times the norm that PyTorch's default initialization would "
        "give it. The second limit allows a weight that starts small to grow to a normal size. "
        f"Weights that start near zero (root mean square below {_TINY:g}) are ignored. The finding "
        "is only a hint if the loss has fallen by half and is still near its minimum (the means of "
        "tenths of the run are compared)."
    )
    source = (
        "TheDeepChecker's check for diverging weights, which requires them to double at each of "
        "five checks."
    )
    advice = (
        "Lower the learning rate, add weight decay, or add a normalization layer after this layer."
    )
    explained_by = ("nonfinite", "large_update", "accumulated_gradient")
    Parameters = GrowingParameters
    of_state, harmless = True, True
    statistics = ("l2",)
    evidence = "times its initial or usual size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, 1)
    _least = per_run(Largest, smallest=True)

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        further = "Alternatively, add a normalization layer after this layer."
        if not decays(scene):
            further = "Alternatively, add weight decay or a normalization layer after this layer."
        return lower_rate(scene, self.advice, further=further)

    def wants(self, table: SlotTable) -> Mask:
        """Return the weights."""
        return table.weights

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the norm divided by its first value."""
        norm = window.read("l2", at).astype(np.float64)
        early = self._early.look(at, norm)
        growth = norm / np.fmax(early, window.of_shape(usual_norm, at))
        least = self._least.look(at, norm)
        started = least / np.sqrt(window.elements(at)) > _TINY
        return started & (growth > self.parameters.growth), growth

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} has grown to {self.streak.worst[slot]:.3g} times its "
            f"initial or usual norm by step {self.streak.worst_step[slot]}."
        )
