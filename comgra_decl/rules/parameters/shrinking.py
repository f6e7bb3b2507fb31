"""Weights that shrink towards zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Early,
    Finding,
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

_FIRST = 3  # records whose median is the initial value


class ShrinkingParameters(Patient):
    """Options of `shrinking_weight`."""

    patience: Count = 3

    share: Fraction = 0.1
    """Smallest allowed norm of a weight, as a share of its initial norm."""


class ShrinkingWeight(SlotRule):
    """Weights that shrink towards zero."""

    name = "shrinking_weight"
    certainty = 0.65
    definition = (
        "For `patience` records in a row, the l2 norm of a weight is below `share` times its "
        f"initial value (the median over the first {_FIRST} records). A hint if only embeddings "
        "shrink while the loss keeps falling: PyTorch initializes them with a standard deviation "
        "of 1, which is often more than a model needs."
    )
    source = (
        "TheDeepChecker, which looks for a regularization term that dominates the loss. Weight "
        "decay alone removes a share of 1 - (1 - rate * decay)^steps of a weight, which is "
        "negligible for common settings."
    )
    advice = (
        "Lower the weight decay. Values from 0.01 to 0.1 are common for AdamW, but the effect "
        "depends on the product of learning rate and weight decay. If no weight decay is used, "
        "look for a penalty in the loss or an unnecessary layer."
    )
    explained_by = ("nonfinite", "large_update")
    Parameters = ShrinkingParameters
    of_state = True
    statistics = ("l2",)
    lowest, evidence = True, "share of its initial size"
    needs = "parameters, {select: '**', capture: [parameter]}"

    _early = per_run(Early, _FIRST)

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        return lower_decay(scene, self.advice)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if only embeddings shrink and the loss falls."""
        infos = scene.table.infos
        shrunk = {infos[slot].module_class for slot in self.streak.lasting.tolist()}
        found = super().findings(scene)
        if found and shrunk <= {"Embedding", "EmbeddingBag"} and scene.falls:
            return [replace(found[0], severity=self.parameters.severity or "hint")]
        return found

    def wants(self, table: SlotTable) -> Mask:
        """Return the weights."""
        return table.weights

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the norm divided by its initial value."""
        norm = window.read("l2", at).astype(np.float64)
        share = norm / self._early.look(at, norm)
        return share < self.parameters.share, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} has shrunk to {self.streak.worst[slot]:.2g} of its initial "
            f"norm by step {self.streak.worst_step[slot]}."
        )
