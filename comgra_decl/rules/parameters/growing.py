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

_TINY = 3e-3  # weights with a smaller root mean square count as initialized to zero


class GrowingParameters(Patient):
    """The options of `growing_weight`."""

    patience: Count = 3

    growth: Factor = 10.0
    """How much a weight may grow from its first size."""


class GrowingWeight(SlotRule):
    """Weights that keep growing."""

    name = "growing_weight"
    certainty = 0.55
    definition = (
        "For `patience` records in a row, the l2 norm of a weight exceeds `growth` times its first "
        "value and `growth` times the norm that PyTorch's default initialization would give it: a "
        "weight that starts smaller may grow to that size. Weights that start near zero (root mean "
        f"square below {_TINY:g}) do not count."
    )
    source = "TheDeepChecker's diverging weights (doubling at each of five checks)."
    advice = "Lower the learning rate, add weight decay, or normalize after the layer."
    explained_by = ("nonfinite", "large_update", "accumulated_gradient")
    Parameters = GrowingParameters
    of_state = True
    statistics = ("l2",)
    evidence = "times its first or usual size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, 1)
    _least = per_run(Largest, smallest=True)

    def advise(self, scene: Scene) -> str:
        """Returns the advice, adapted to the optimizer settings."""
        further = "Or normalize after the layer."
        if not decays(scene):
            further = "Or add weight decay, or normalize after the layer."
        return lower_rate(scene, self.advice, further=further)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the weights."""
        return table.weights

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the norm with its first value."""
        norm = window.read("l2", at).astype(np.float64)
        early = self._early.look(at, norm)
        growth = norm / np.fmax(early, window.of_shape(usual_norm, at))
        least = self._least.look(at, norm)
        started = least / np.sqrt(window.elements(at)) > _TINY
        return started & (growth > self.parameters.growth), growth

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} has grown to {self.streak.worst[slot]:.3g} times its first "
            f"or usual size by step {self.streak.worst_step[slot]}."
        )
