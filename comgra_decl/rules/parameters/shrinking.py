"""Weights that fade away."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Early,
    Fraction,
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


class ShrinkingParameters(Patient):
    """What can be said of `shrinking_weight`."""

    patience: Count = 3
    """For so many records in a row it must be so."""

    share: Fraction = 0.1
    """Below this share of its first size a weight has faded."""


class ShrinkingWeight(SlotRule):
    """Weights that fade away."""

    name = "shrinking_weight"
    certainty = 0.65
    definition = (
        "The l2 norm of a weight is below `share` of what it was at first (median of three "
        "records), for `patience` records."
    )
    source = (
        "TheDeepChecker (regularisation overwhelms the loss); weight decay alone takes "
        "1 - (1 - rate * decay)^steps of a weight, which is next to nothing at usual values."
    )
    advice = (
        "Lower the weight decay (AdamW: 0.01 to 0.1): what counts is learning rate times decay. If "
        "there is none, look for a penalty in the loss, or for a layer that is not needed."
    )
    explained_by = ("nonfinite", "large_update")
    Parameters = ShrinkingParameters
    statistics = ("l2",)
    lowest, evidence = True, "share of its first size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, 3)

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights."""
        return table.parameters & table.where(lambda info: len(info.shape) > 1)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with what it was at first."""
        norm = window.read("l2", at).astype(np.float64)
        share = norm / self._early.look(at, norm)
        return share < self.parameters.share, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how far it has fallen."""
        return (
            f"{scene.table.place(slot)} has fallen to {self.streak.worst[slot]:.2g} of its first "
            f"size (step {self.streak.worst_step[slot]})."
        )
