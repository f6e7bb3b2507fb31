"""Logits that are scaled down so far that the softmax remains uniform."""

from __future__ import annotations

from math import log

import numpy as np

from comgra_decl.rules.api import (
    LOGITS_OF_CLASSES,
    Count,
    Finding,
    LossCall,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
    place_of,
    prediction_of,
)


class FlatParameters(RuleParameters):
    """Options of `flat_logits`."""

    least: Count = 20
    """Number of records required."""

    steps: Count = 50
    """Number of steps required."""

    range: Positive = 0.5
    """Largest difference between a sample's logits for which they still count as flat."""


class FlatLogits(Rule):
    """Logits that are scaled down so far that the softmax remains uniform."""

    name = "flat_logits"
    certainty = 0.75
    definition = (
        "The prediction passed to a cross-entropy is the result of a multiplication or division, "
        "such as similarities times a temperature. In each of at least `least` records from a "
        "run of at least `steps` steps, the largest element in the batch minus the smallest is "
        "below `range`. No class can then get a probability far from 1 / classes, so the loss "
        "remains at ln(classes)."
    )
    source = (
        "Chen et al., A Simple Framework for Contrastive Learning (2020): similarities are divided "
        "by a temperature of 0.05 to 0.5."
    )
    advice = "Divide similarities by the temperature (x / 0.07), or multiply them by its inverse."
    Parameters = FlatParameters

    _most: dict[int, tuple[int, float]] = per_run(dict)  # records and largest range, by slot

    def look(self, window: Window) -> None:
        """Store the largest range of each prediction."""
        if not window.has("min", "max"):
            return
        slots = {prediction_of(self.scene, c) for c in self.scene.calls if _is_scaled(c)}
        for slot in sorted(s for s in slots if s is not None):
            at = np.array([slot])
            high = window.read("max", at)[:, 0] + 2 * window.read("max", at, "std")[:, 0]
            low = window.read("min", at)[:, 0] - 2 * window.read("min", at, "std")[:, 0]
            for value in (high - low).astype(np.float64)[window.present[:, slot]].tolist():
                count, most = self._most.get(slot, (0, 0.0))
                self._most[slot] = count + 1, max(most, value)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss with flat logits."""
        for call, seen in scene.calls.items():
            slot = prediction_of(scene, call) if _is_scaled(call) else None
            count, most = self._most.get(-1 if slot is None else slot, (0, np.inf))
            enough = count >= self.parameters.least and scene.last_step >= self.parameters.steps
            if enough and most < self.parameters.range and call.classes > 1:
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"The logits passed to {call.function} never differ by more than "
                        f"{most:.2g}, because they are multiplied by a small number. The softmax "
                        f"remains uniform, and the loss remains at about ln({call.classes}) = "
                        f"{log(call.classes):.3g}.",
                        evidence={"range": float(most), "classes": call.classes},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not self._most:
            return "no cross-entropy receives a scaled prediction"
        count = max(n for n, _ in self._most.values())
        least = self.parameters.least
        return None if count >= least else f"it needs {least} records; the run has {count}"


def _is_scaled(call: LossCall) -> bool:
    return call.function in LOGITS_OF_CLASSES and call.prediction.made_by in ("Mul", "Div")
