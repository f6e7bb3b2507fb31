"""Class weights that favour classes that are already frequent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    Count,
    Factor,
    Finding,
    LossCall,
    Rule,
    RuleParameters,
    Scene,
    SlotInfo,
    Slots,
    SlotTable,
    Window,
    count_binary,
    per_run,
    target_of,
)


def _several_labels(table: SlotTable) -> Slots:
    """Return the slots of floating-point targets with several values per sample."""
    wide = table.where(lambda i: "float" in i.dtype and len(i.shape) > 1 and i.shape[1:] != (1,))
    return np.flatnonzero(table.targets & wide)


def _size(info: SlotInfo) -> float:
    return float(math.prod(info.shape))


def _typical(weights: Sequence[float]) -> float:
    """Return the geometric mean of positive weights."""
    return float(np.exp(np.log(weights).mean()))


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
        "are ignored. For a binary loss, the rule reports a `pos_weight` of at most 1 / `ratio` "
        "(the geometric mean of several labels) if positive targets are rarer than negative "
        "ones by the square of `ratio`, and the reverse."
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

    _labels: dict[int, dict[int, int]] = per_run(dict)  # zeros and ones, by slot

    def look(self, window: Window) -> None:
        """Count classes, and the ones among targets with several labels per sample."""
        self.scene.count_classes(window)
        for slot in window.table.remembered(InvertedWeights, _several_labels).tolist():
            at = np.array([slot])
            sizes = window.of_shape(_size, at)[:, 0]
            count_binary(self._labels.setdefault(slot, {}), window, at, sizes)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss with inverted weights."""
        for call, seen in scene.calls.items():
            found = self._compared(scene, call)
            if found is None:
                continue
            most, rarest, counts = found
            weights = call.weights
            if call.function in BINARY_LOGITS:
                weights = (1.0, _typical(call.weights))
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
        slot = target_of(scene, call)
        slot = -1 if slot is None else slot
        known = scene.classes.by_slot.get(slot, {})
        if call.function in BINARY_LOGITS and call.argument("pos_weight") is True:
            return self._binary(call.weights, self._labels.get(slot, known))
        if len(call.weights) < 2 or call.function not in CLASSIFICATION:
            return None
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

    def _binary(
        self, weights: tuple[float, ...], known: dict[int, int]
    ) -> tuple[int, int, dict[int, int]] | None:
        """Compare the weight of positive targets with their frequency."""
        counts = {c: known.get(c, 0) for c in (0, 1)}
        if not weights or min(weights) <= 0 or sum(counts.values()) < self.parameters.least:
            return None
        weight = _typical(weights)
        most, limit = max(counts, key=counts.__getitem__), self.parameters.ratio
        rarer = counts[1 - most]
        favoured = weight if most == 1 else 1 / weight
        skewed = rarer > 0 and counts[most] >= limit**2 * rarer
        return (most, 1 - most, counts) if skewed and favoured >= limit else None

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not any(call.weights for call in scene.calls):
            return "no loss has class weights"
        if not scene.has_histograms:
            return "no histograms are recorded; set `histogram: {bins: 64}`"
        return None
