"""Losses that receive the wrong type of prediction, such as probabilities instead of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    LOGITS_OF_CLASSES,
    FactRule,
    Finding,
    LossCall,
    Mask,
    Measured,
    Place,
    Scene,
    Seen,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    place_of,
    prediction_of,
    target_of,
)

_UNEVEN = 0.1  # difference of the sum of probabilities from 1
_LOGARITHMS = ("LogSoftmax", "LogSigmoid", "Log", "Logsumexp")


_LAYERS = frozenset({"Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Linear"})
"""Functions whose results are no probabilities, by their names in autograd."""


class ProbabilitiesAsLogits(SlotRule):
    """Probabilities passed to a cross-entropy, which applies the softmax again."""

    name = "probabilities_as_logits"
    severity = "error"
    certainty = 0.9
    definition = (
        "The prediction passed to a cross-entropy was computed by a softmax or sigmoid. "
        "Alternatively, for `patience` records in a row, its elements are in [0, 1] and average 1 "
        "/ C over the C classes in every sample."
    )
    source = (
        "Applying the softmax twice is a common mistake. The limit below which the loss cannot "
        "fall follows from logits in [0, 1]."
    )
    advice = "Pass the input of the softmax to the loss, or use NLLLoss with log-probabilities."
    statistics = ("min", "max", "mean")
    evidence, of_graph, of_calls = "classes", True, True
    needs = "outputs, {select: '**', capture: [output]}"

    _classes: Slots = np.zeros(0, np.int64)

    def wants(self, table: SlotTable) -> Mask:
        """Return the predictions passed to a cross-entropy."""
        self._classes = np.zeros(len(table), np.int64)
        for call in self._calls(self.scene):
            slot = prediction_of(self.scene, call)
            if slot is not None and call.prediction.made_by not in _LAYERS:
                self._classes[slot] = call.classes
        return self._classes > 1

    @staticmethod
    def _calls(scene: Scene) -> dict[LossCall, Seen]:
        return {call: s for call, s in scene.calls.items() if call.function in LOGITS_OF_CLASSES}

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where elements are in [0, 1] and average 1 / C; and C."""
        classes = self._classes[at].astype(np.float64)
        total = window.read("mean", at) * classes
        spread = window.read("mean", at, "std") * classes
        hit = (window.read("min", at) >= 0) & (window.read("max", at) <= 1 + 1e-6)
        hit &= (np.abs(total - 1) < 1e-3) & (spread < 1e-3)
        return hit, np.broadcast_to(classes, hit.shape)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss that receives probabilities."""
        for call, seen in self._calls(scene).items():
            if call.prediction.made_by in ("Softmax", "Sigmoid"):
                how = call.prediction.made_by.lower()
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"{call.function} receives probabilities, computed by a {how}, "
                        "and applies the softmax to them again. The loss cannot fall below "
                        f"{_bound(call.classes):.3g}.",
                        certainty=0.95,
                        evidence={"made_by": how, "classes": call.classes},
                    )
                ]
        return super().findings(scene)

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        calls = self._calls(scene)
        if not calls:
            return "no cross-entropy was called"
        known = any(call.prediction.made_by for call in calls)
        return None if known else super().missing(scene)

    def marks(self) -> dict[int, int]:
        """Return no slots: attention also consists of probabilities."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} contains probabilities, to which the loss applies the "
            f"softmax again. The loss cannot fall below {_bound(int(self.streak.worst[slot])):.3g}."
        )


class LogitsAsLogProbabilities(SlotRule):
    """Predictions passed to a negative log-likelihood that are not log-probabilities."""

    name = "logits_as_log_probabilities"
    severity = "error"
    certainty = 0.85
    definition = (
        "The prediction passed to `nll_loss` or `ctc_loss` has elements above 0 for `patience` "
        "records in a row. Alternatively, the prediction passed to one of them or to `kl_div` was "
        "computed by a softmax. Logarithms of probabilities are never positive."
    )
    source = "Passing logits or probabilities to NLLLoss is a common mistake. Our own definition."
    advice = (
        "Apply log_softmax to the logits first. Instead of nll_loss, you can also use "
        "cross_entropy, which expects logits."
    )
    statistics = ("max",)
    evidence, of_graph, of_calls = "largest element", True, True
    needs = "outputs, {select: '**', capture: [output]}"

    def wants(self, table: SlotTable) -> Mask:
        """Return the predictions passed to `nll_loss` and `ctc_loss`."""
        mask = np.zeros(len(table), np.bool_)
        for call in self._calls(self.scene):
            slot = prediction_of(self.scene, call)
            if slot is not None and call.function != "kl_div":
                mask[slot] = True
        return mask

    @staticmethod
    def _calls(scene: Scene) -> dict[LossCall, Seen]:
        wanted = (CLASSIFICATION - LOGITS_OF_CLASSES) | {"kl_div", "ctc_loss"}
        return {call: seen for call, seen in scene.calls.items() if call.function in wanted}

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where elements are positive, and the largest element."""
        largest = window.read("max", at).astype(np.float64)
        return largest > 1e-3, largest

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss that does not receive logarithms."""
        for call, seen in self._calls(scene).items():
            if call.prediction.made_by == "Softmax":
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=(
                            f"{call.function} receives probabilities, but expects their logarithms."
                        ),
                        evidence={"made_by": "softmax"},
                    )
                ]
        if any(call.prediction.made_by in _LOGARITHMS for call in self._calls(scene)):
            return []
        return super().findings(scene)

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        none = "neither nll_loss nor ctc_loss was called"
        return super().missing(scene) if self._calls(scene) else none

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is passed to a loss that expects logarithms of "
            f"probabilities, but has elements up to {self.streak.worst[slot]:.3g}. Such logarithms "
            "are never positive."
        )


class SeveralLabels(SlotRule):
    """Samples with several labels in a loss for one label per sample."""

    name = "several_labels"
    certainty = 0.8
    definition = (
        "The target of a cross-entropy contains one value in [0, 1] per class, and for `patience` "
        "records in a row, the sums over the classes differ from 1: by more than 0.1 on average, "
        "or between samples with a standard deviation above 0.1."
    )
    source = (
        "`torch.nn.CrossEntropyLoss` expects the probabilities of classes, which add up to 1. Our "
        "own limits."
    )
    advice = (
        "If a sample can have several labels, or none, use binary_cross_entropy_with_logits: one "
        "decision per label."
    )
    statistics = ("min", "max", "mean")
    evidence, of_calls = "mean sum", True
    needs = "a cross-entropy with probabilities as targets"

    _classes: Slots = np.zeros(0, np.int64)

    def wants(self, table: SlotTable) -> Mask:
        """Return floating-point targets of cross-entropies that have one value per class."""
        self._classes = np.zeros(len(table), np.int64)
        for call in self.scene.calls:
            slot = target_of(self.scene, call)
            whole = call.function not in LOGITS_OF_CLASSES or call.target.is_integer
            if not whole and slot is not None and call.target.shape == call.prediction.shape:
                self._classes[slot] = call.classes if len(call.target.shape) == 2 else 0
        return self._classes > 1

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the sums differ from 1; and their mean."""
        classes = self._classes[at].astype(np.float64)
        total = window.read("mean", at) * classes
        spread = window.read("mean", at, "std") * classes
        inside = (window.read("min", at) >= 0) & (window.read("max", at) <= 1 + 1e-6)
        return inside & ((np.abs(total - 1) > _UNEVEN) | (spread > _UNEVEN)), total

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"The values of {scene.table.place(slot)} add up to "
            f"{self.streak.worst[slot]:.3g} per sample, not to 1: cross_entropy treats the labels "
            "of a sample as alternatives."
        )


class SigmoidTwice(SlotRule):
    """Probabilities passed to a binary cross-entropy, which applies the sigmoid again."""

    name = "sigmoid_twice"
    severity = "error"
    certainty = 0.9
    definition = (
        "The prediction passed to `binary_cross_entropy_with_logits` was computed by a sigmoid or "
        "softmax. If autograd does not reveal how it was computed, the rule reports it only if "
        "there are at least `patience` records and the targets vary. All elements must then be in "
        "[0, 1] in every record, with the smallest below 0.05 and the largest above 0.95. The rule "
        "also reports a sigmoid, or its logarithm, that the program itself applies to the result "
        "of a sigmoid, as in a focal loss that expects logits."
    )
    source = "Applying a sigmoid before BCEWithLogitsLoss is a common mistake. Our own definition."
    advice = (
        "Remove the sigmoid, or use BCELoss. Apply the sigmoid only where probabilities are needed."
    )
    statistics = ("min", "max")
    evidence, of_graph, of_calls = "largest element", True, True
    needs = "outputs, {select: '**', capture: [output]}"

    _outside: set[int]

    def reset(self) -> None:
        """Reset the state of the rule."""
        super().reset()
        self._outside = set()

    def wants(self, table: SlotTable) -> Mask:
        """Return the predictions passed to the loss whose origin is unknown."""
        mask = np.zeros(len(table), np.bool_)
        for call in self._calls(self.scene):
            slot = prediction_of(self.scene, call)
            if slot is not None and not call.prediction.made_by:
                mask[slot] = True
        return mask

    @staticmethod
    def _calls(scene: Scene) -> dict[LossCall, Seen]:
        return {call: seen for call, seen in scene.calls.items() if call.function in BINARY_LOGITS}

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where elements are probabilities, and store where they are not."""
        low = window.read("min", at).astype(np.float64)
        # the largest and smallest elements over all samples in the batch
        high = window.read("max", at, "abs_max").astype(np.float64)
        inside = (low >= 0) & (high <= 1)
        self._outside |= {int(s) for s in at[(~inside & window.present[:, at]).any(0)]}
        return inside & (low < 0.05) & (high > 0.95), high

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out predictions that were ever outside [0, 1], in any call of their model."""
        infos = scene.table.infos
        outside = {infos[slot].key.node for slot in self._outside}
        known = [infos[slot].key.node in outside for slot in fired.tolist()]
        return fired[~np.array(known, np.bool_)]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first loss that receives probabilities."""
        for call, seen in self._calls(scene).items():
            if call.prediction.made_by in ("Sigmoid", "Softmax"):
                how = call.prediction.made_by.lower()
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"{call.function} receives probabilities, computed by a {how}, "
                        "and applies the sigmoid to them again.",
                        certainty=0.95,
                        evidence={"made_by": how},
                    )
                ]
        for fact in scene.told("sigmoid twice")[:1]:
            return [
                self.finding(
                    scene,
                    place=Place(str(fact["where"])),
                    first_step=0,
                    message=f"{fact['where']} applies a sigmoid to the result of a sigmoid of "
                    f"shape {fact['shape']}, so all results lie between 0.5 and 0.73.",
                    evidence={"function": str(fact["function"])},
                )
            ]
        return super().findings(scene)

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        calls = self._calls(scene)
        if not calls:
            return "no binary cross-entropy with logits was called"
        known = any(call.prediction.made_by for call in calls)
        return None if known else super().missing(scene)

    def marks(self) -> dict[int, int]:
        """Return no slots: gates also contain probabilities."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} contains probabilities, to which the loss applies the "
            "sigmoid again."
        )


def _bound(classes: int) -> float:
    """Return the smallest possible cross-entropy if the logits are probabilities of C classes."""
    return float(np.log1p((classes - 1) / np.e))


class RateAsLog(FactRule):
    """Rates passed to a loss that expects their logarithm."""

    name = "rate_as_log"
    severity = "error"
    certainty = 0.9
    definition = (
        "`poisson_nll_loss` with `log_input=True`, its default, receives the result of an "
        "exponential or a softplus: a rate, to which it applies the exponential again."
    )
    source = "PyTorch's documentation of PoissonNLLLoss: `log_input` is True by default."
    advice = "Pass the logarithm of the rate (remove the exponential), or `log_input=False`."
    kind = "rate as log"
    shown = ("function", "made_by")

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        made_by = {"Exp": "an exponential"}.get(str(fact["made_by"]), "a softplus")
        return (
            f"{fact['function']} in {fact['where']} expects the logarithm of a rate, but receives "
            f"the result of {made_by}, to which it applies the exponential again."
        )
