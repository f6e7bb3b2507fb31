"""Probabilities passed to a loss that expects logits."""

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
    """Probabilities passed to a cross-entropy, which applies the softmax again."""

    name = "probabilities_as_logits"
    severity = "error"
    certainty = 0.85
    definition = (
        "The network's predictions lie in 0 .. 1 and sum to 1 for every sample, for `patience` "
        "records in a row; their targets are classes (integers); and the loss never falls below "
        "what a cross-entropy of probabilities can reach, ln(1 + (C - 1) / e)."
    )
    source = "A common mistake: softmax twice. The bound is that of logits in 0 .. 1."
    advice = "Pass the input of the softmax to the loss, or use NLLLoss with log-probabilities."
    statistics = ("min", "max", "mean")
    evidence = "classes"
    needs = "outputs, {select: '**', capture: [output]}"

    _smallest_loss = float("inf")

    def look_at_numbers(self, numbers: Any) -> None:
        """Notes the smallest loss."""
        if numbers.name == "loss" and len(numbers.values):
            smallest = np.nanmin(np.append(numbers.values, np.inf))
            self._smallest_loss = min(self._smallest_loss, float(smallest))

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs that may be rows of classes."""
        return table.outputs & table.where(lambda i: len(i.shape) == 2 and i.batch_dim == 0)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Finds rows that sum to 1."""
        classes = window.elements(at)
        total = window.read("mean", at) * classes
        spread = window.read("mean", at, "std") * classes
        hit = (classes > 1) & (window.read("min", at) >= 0) & (window.read("max", at) <= 1 + 1e-6)
        hit &= (np.abs(total - 1) < 1e-3) & (spread < 1e-3)
        return hit, classes

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps predictions whose targets are classes."""
        final = predictions(scene)
        asked = any("int" in target.dtype for _, target in target_pairs(scene))
        keep = [
            slot in final and asked and self._smallest_loss >= 0.99 * self._bound(slot)
            for slot in fired.tolist()
        ]
        return fired[np.array(keep, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: attention, too, consists of probabilities."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} contains probabilities, and the loss seems to apply the "
            f"softmax to them again: it cannot fall below {self._bound(slot):.3g}."
        )

    def _bound(self, slot: int) -> float:
        return float(np.log1p((self.streak.worst[slot] - 1) / np.e))
