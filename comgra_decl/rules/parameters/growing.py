"""Weights that grow without end."""

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
    per_run,
)

_TINY = 1e-3  # a root mean square below which a weight counts as having begun at zero


class GrowingParameters(Patient):
    """What can be said of `growing_weight`."""

    patience: Count = 3
    """For so many records in a row it must be so."""

    growth: Factor = 10.0
    """So many times its first size is too much."""


class GrowingWeight(SlotRule):
    """Weights that grow without end."""

    name = "growing_weight"
    certainty = 0.55
    definition = (
        "The l2 norm of a weight is more than `growth` times what it was at first (median of three "
        "records), for `patience` records. Weights that begin near zero (root mean square below "
        "1e-3) are left out."
    )
    source = "TheDeepChecker's diverging weights (doubling at each of five checks)."
    advice = "Lower the learning rate, add weight decay, or put a normalisation behind the layer."
    explained_by = ("nonfinite", "large_update", "accumulated_gradient")
    Parameters = GrowingParameters
    statistics = ("l2",)
    evidence = "times its first size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, 3)
    _least = per_run(Largest, smallest=True)

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights."""
        return table.parameters & table.where(lambda info: len(info.shape) > 1)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with what it was at first."""
        norm = window.read("l2", at).astype(np.float64)
        early = self._early.look(at, norm)
        growth = norm / early
        least = self._least.look(at, norm)
        begun = least / np.sqrt(window.elements(at)) > _TINY
        return begun & (growth > self.parameters.growth), growth

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how far it has grown."""
        return (
            f"{scene.table.place(slot)} has grown to {self.streak.worst[slot]:.3g} times its first "
            f"size (step {self.streak.worst_step[slot]})."
        )
