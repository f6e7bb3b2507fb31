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
    lower_decay,
    per_run,
)

_FIRST = 3  # records; their median is the initial value


class ShrinkingParameters(Patient):
    """The options of `shrinking_weight`."""

    patience: Count = 3

    share: Fraction = 0.1
    """How far a weight may shrink, relative to its first size."""


class ShrinkingWeight(SlotRule):
    """Weights that fade away."""

    name = "shrinking_weight"
    certainty = 0.65
    definition = (
        "The l2 norm of a weight is below `share` times its initial value (median of the first "
        f"{_FIRST} records) for `patience` records in a row."
    )
    source = (
        "TheDeepChecker (regularization overwhelms the loss). Weight decay alone removes 1 - (1 - "
        "rate * decay)^steps of a weight, which is close to nothing at usual values."
    )
    advice = (
        "Lower the weight decay (usual for AdamW: 0.01 to 0.1); what counts is learning rate times "
        "decay. If there is none, look for a penalty in the loss, or for a layer that is not "
        "needed."
    )
    explained_by = ("nonfinite", "large_update", "strong_decay")
    Parameters = ShrinkingParameters
    of_state = True
    statistics = ("l2",)
    lowest, evidence = True, "share of its first size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, _FIRST)

    def advise(self, scene: Scene) -> str:
        """Returns the advice, adapted to the optimizer settings."""
        return lower_decay(scene, self.advice)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the weights."""
        return table.weights

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the norm with its first value."""
        norm = window.read("l2", at).astype(np.float64)
        share = norm / self._early.look(at, norm)
        return share < self.parameters.share, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} has shrunk to {self.streak.worst[slot]:.2g} of its first "
            f"size by step {self.streak.worst_step[slot]}."
        )
