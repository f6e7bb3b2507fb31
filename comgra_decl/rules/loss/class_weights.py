"""Class weights that favour classes that are already frequent."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    CLASSIFICATION,
    Count,
    Factor,
    Finding,
    LossCall,
    Rule,
    RuleParameters,
    Scene,
    Window,
    target_of,
)


class ClassWeightParameters(RuleParameters):
    """Options of `inverted_weights`."""

    least: Count = 100
    """Number of recorded targets required."""

    ratio: Factor = 2.0
    """Smallest ratio of frequencies, and of weights, between the most frequent and rarest class."""


class InvertedWeights(Rule):
    """Class weights that favour classes that are already frequent."""

    name = "inverted_weights"
    certainty = 0.8
    definition = (
        "The weights passed to a cross-entropy rise with the class frequencies among at least "
        "`least` recorded targets: the logarithms of weights and frequencies have a correlation "
        "above 0.7. Compared with the rarest class, the most frequent one is at least `ratio` "
        "times as frequent and has at least `ratio` times the weight. Classes with a weight of 0 "
        "are ignored."
    )
    source = (
        "Weights should be inversely proportional to class frequencies (scikit-learn's "
        "class_weight='balanced')."
    )
    advice = (
        "Use weights that are inversely proportional to the frequencies: total / (classes * "
        "counts)."
    )
    Parameters = ClassWeightParameters

    def look(self, window: Window) -> None:
        """Counts classes."""
        self.scene.count_classes(window)

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first loss with inverted weights."""
        for call, seen in scene.calls.items():
            found = self._compared(scene, call)
            if found is None:
                continue
            most, rarest, counts = found
            weights = call.weights
            return [
                self.finding(
                    scene,
                    first_step=seen.first,
                    last_step=seen.last,
                    message=f"The class weights of {call.function} favour frequent classes: class "
                    f"{most} ({counts[most]} of {sum(counts.values())} targets) has weight "
                    f"{weights[most]:.3g}, class {rarest} ({counts[rarest]}) "
                    f"{weights[rarest]:.3g}.",
                    evidence={"heavy": weights[most], "light": weights[rarest]},
                )
            ]
        return []

    def _compared(self, scene: Scene, call: LossCall) -> tuple[int, int, dict[int, int]] | None:
        if len(call.weights) < 2 or call.function not in CLASSIFICATION:
            return None
        slot = target_of(scene, call)
        known = scene.classes.by_slot.get(-1 if slot is None else slot, {})
        counts = {
            c: n for c, n in known.items() if 0 <= c < len(call.weights) and call.weights[c] > 0
        }
        if len(counts) < 2 or sum(counts.values()) < self.parameters.least:
            return None
        classes = [*counts]
        often = np.log([counts[c] for c in classes])
        heavy = np.log([call.weights[c] for c in classes])
        if often.std() == 0 or heavy.std() == 0 or np.corrcoef(often, heavy)[0, 1] < 0.7:
            return None
        most, rarest = max(classes, key=counts.__getitem__), min(classes, key=counts.__getitem__)
        limit = self.parameters.ratio
        frequent = counts[most] >= limit * counts[rarest]
        heavier = call.weights[most] >= limit * call.weights[rarest]
        return (most, rarest, counts) if frequent and heavier else None

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        if not any(call.weights for call in scene.calls):
            return "no loss has class weights"
        if not scene.has_histograms:
            return "no histograms are recorded; set `histogram: {bins: 64}`"
        return None
