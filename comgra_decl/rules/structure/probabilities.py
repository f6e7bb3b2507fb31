"""Probabilities where logits should be."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    Mask,
    Measured,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    predictions,
    target_pairs,
)


class ProbabilitiesAsLogits(SlotRule):
    """Probabilities that enter a cross-entropy, which takes the softmax once more."""

    name = "probabilities_as_logits"
    severity = "error"
    certainty = 0.85
    definition = (
        "What the network answers lies in 0 .. 1 and sums to 1 for every sample, for `patience` "
        "records; its targets are classes (integers); and the loss never was below what a "
        "cross-entropy of probabilities can reach, ln(1 + (C - 1) / e)."
    )
    source = "A common mistake: softmax twice. The bound is that of logits in 0 .. 1."
    advice = "Give the loss what enters the softmax, or use NLLLoss of log-probabilities."
    statistics = ("min", "max", "mean")
    evidence = "classes"
    needs = "outputs, {select: '**', capture: [output]}"

    _smallest_loss = float("inf")

    def look_at_numbers(self, numbers: Any) -> None:
        """Remembers the smallest loss."""
        if numbers.name == "loss" and len(numbers.values):
            smallest = np.nanmin(np.append(numbers.values, np.inf))
            self._smallest_loss = min(self._smallest_loss, float(smallest))

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs that may be rows of classes."""
        return table.outputs & table.where(lambda i: len(i.shape) == 2 and i.batch_dim == 0)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks for rows that sum to 1."""
        classes = window.elements(at)
        total = window.read("mean", at) * classes
        spread = window.read("mean", at, "std") * classes
        hit = (classes > 1) & (window.read("min", at) >= 0) & (window.read("max", at) <= 1 + 1e-6)
        hit &= (np.abs(total - 1) < 1e-3) & (spread < 1e-3)
        return hit, classes

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps answers to questions of class."""
        final = predictions(scene)
        asked = any("int" in target.dtype for _, target in target_pairs(scene))
        keep = [
            slot in final and asked and self._smallest_loss >= 0.99 * self._bound(slot)
            for slot in fired.tolist()
        ]
        return fired[np.array(keep, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: attention, for one, is made of probabilities."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says that the softmax is taken twice."""
        return (
            f"{scene.table.place(slot)} holds probabilities, and a loss for logits seems to take "
            f"their softmax once more: it cannot get below {self._bound(slot):.3g}."
        )

    def _bound(self, slot: int) -> float:
        return float(np.log1p((self.streak.worst[slot] - 1) / np.e))
