"""Probabilities passed to a binary cross-entropy that expects logits."""

from __future__ import annotations

from math import prod

import numpy as np

from comgra_decl.rules.api import (
    Mask,
    Measured,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    grown,
    predictions,
    target_pairs,
)

_LOW, _HIGH = 0.26, 0.74  # sigmoid(0 .. 1) is 0.5 .. 0.731, and 1 minus that from 0.269


class SigmoidTwice(SlotRule):
    """Probabilities passed to a binary cross-entropy, which applies the sigmoid again."""

    name = "sigmoid_twice"
    severity = "error"
    certainty = 0.85
    definition = (
        "The network's predictions lie in 0 .. 1 in every record and every call; their targets "
        "are 0 and 1 (floating-point); and their gradient, times the number of predictions, has a "
        f"magnitude between {_LOW} and {_HIGH} for `patience` records in a row, as sigmoid(p) - y "
        "has for a probability p. The gradient of BCELoss is at least 1. Logits, such as a "
        "discriminator's, may be small and positive for a while, but sooner or later one is "
        "negative."
    )
    source = (
        "A common mistake: a sigmoid before BCEWithLogitsLoss. The bounds are those of its "
        "derivative."
    )
    advice = "Remove the sigmoid, or use BCELoss; apply the sigmoid where probabilities are needed."
    statistics = ("max", "abs_mean", "abs_max", "mean", "zero_fraction")
    evidence = "largest gradient times answers"
    needs = "outputs and their gradients, {select: '**', capture: [output, output_grad]}"

    _other = np.zeros(0, np.bool_)  # targets with other values than zeros and ones
    _left = np.zeros(0, np.bool_)  # predictions that were outside 0 .. 1

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs whose gradient is recorded."""
        return table.outputs & (_gradients(table) >= 0)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares predictions and their gradients with the bounds."""
        table = window.table
        gradient = table.remembered(SigmoidTwice, _gradients)[at]
        count = window.of_shape(_size, at)
        largest = window.read("abs_max", gradient, "abs_max") * count
        usual = window.read("abs_mean", gradient) * count
        # unlike the batch mean of the minimum, this cannot hide a negative one
        positive = window.read("abs_mean", at) - window.read("mean", at) < 1e-6
        inside = positive & (window.read("max", at, "abs_max") <= 1)
        self._see_targets(window)
        self._left = grown(self._left, len(table), fill=False)
        self._left[at] |= (~inside & window.present[:, at]).any(0)
        return inside & (largest < _HIGH) & (usual > _LOW), largest

    def _see_targets(self, window: Window) -> None:
        """Notes which targets contain anything but zeros and ones."""
        self._other = grown(self._other, len(window.table), fill=False)
        at = np.flatnonzero(window.table.where(lambda info: info.kind == "target"))
        ones = window.read("mean", at) - (1 - window.read("zero_fraction", at))
        wrong = (np.abs(ones) > 1e-5) | (window.read("abs_max", at, "abs_max") > 1)
        self._other[at] |= wrong.any(0)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps predictions of binary targets that are always probabilities."""
        # a target may have appeared after the last window
        other = grown(self._other, len(scene.table), fill=False)
        asked = {
            prediction.id
            for prediction, target in target_pairs(scene)
            if "float" in target.dtype and not other[target.id]
        }
        handed_on = predictions(scene) if asked else set()
        asked |= handed_on
        infos = scene.table.infos
        logits = {infos[slot].key[:2] for slot in np.flatnonzero(self._left).tolist()}
        keep = [slot in asked and infos[slot].key[:2] not in logits for slot in fired.tolist()]
        return fired[np.array(keep, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: gates, too, contain probabilities."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} contains probabilities, and the loss applies the sigmoid "
            "to them again: the gradient is never that of a loss that expects probabilities."
        )


def _size(info: SlotInfo) -> int:
    return prod(info.shape)


def _gradients(table: SlotTable) -> Slots:
    """Returns the slot of each output's gradient; -1 if it is not recorded."""
    found = [table.by_key.get(i.key._replace(pass_="grad"), -1) for i in table.infos]
    return np.array(found, np.int64)
