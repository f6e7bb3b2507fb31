"""Classifiers that predict one class for everything."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    Count,
    Field,
    Mask,
    Measured,
    Number,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    prediction_of,
    target_of,
    target_pairs,
)

_FEWEST = 4  # recorded samples


class OneAnswerParameters(Patient):
    """The options of `one_answer`."""

    patience: Count = 15
    """How many records in a row must meet the condition; many trainings start like this."""

    surety: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """How confident the prediction must be, from 0 (guessing) to 1 (certain)."""


class OneAnswer(SlotRule):
    """A classifier that predicts one class for everything."""

    name = "one_answer"
    certainty = 0.65
    definition = (
        "For `patience` records in a row, the predictions of all recorded samples (at least "
        f"{_FEWEST}) favour the same class although the targets of the batch differ. Predictions "
        "may have shape [N, classes] (cross-entropy or negative log-likelihood) or be one logit "
        "per sample (binary cross-entropy). The predictions must be confident: the softmax "
        "probability of that class, averaged over the samples, is at least `surety` of the way "
        "from 1 / classes to 1. An untrained network also predicts one class, but only by a small "
        "margin."
    )
    source = (
        "The network that predicts 'dog' for everything in the book chapter 'Debugging: "
        "Visualizing Activation Maps & Gradients'; own limits."
    )
    advice = (
        "Check the class frequencies, the last bias and the learning rate, whether the predictions "
        "differ between samples at all (`input_independence`), and the labels."
    )
    explained_by = ("nonfinite", "input_independence", "single_class", "detached")
    Parameters = OneAnswerParameters
    of_state = True
    statistics = ("mean",)
    evidence, of_graph, of_calls = "class", True, True
    needs = "predictions with `values: true`, and class targets, with `graph: true`"

    _last: dict[int, int] = per_run(dict)
    _seen = False
    _targets: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns predictions [N, classes] that are compared with a target of classes."""
        self._targets = {}
        for call in self.scene.calls:
            prediction, target = prediction_of(self.scene, call), target_of(self.scene, call)
            binary = call.function in BINARY_LOGITS and call.prediction.elements == (
                call.prediction.shape[0] if call.prediction.shape else 0
            )
            classes = call.function in CLASSIFICATION and len(call.prediction.shape) == 2
            if prediction is None or target is None or not (binary or classes):
                continue
            if table.infos[prediction].batch_dim == 0:
                self._targets[prediction] = target
        if not self.scene.calls:  # recorded without facts of loss calls
            self._targets = {
                prediction.id: target.id
                for prediction, target in target_pairs(self.scene)
                if "int" in target.dtype and "float" in prediction.dtype
                if len(prediction.shape) == 2 and len(target.shape) == 1
            }
        return table.where(lambda info: info.id in self._targets)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Reads the recorded samples."""
        predicted = np.full((len(window), len(at)), np.nan)
        hit = np.zeros(predicted.shape, np.bool_)
        for column, slot in enumerate(at.tolist()):
            target = np.array([self._targets[slot]])
            differ = window.read("mean", target, "std")[:, 0] > 0
            for row in range(len(window)):
                values = window.details.values(row, slot) if differ[row] else None
                self._seen = self._seen or values is not None
                one = _one_class(values, self.parameters.surety)
                hit[row, column] = one >= 0 and self._last.get(slot, one) == one
                predicted[row, column] = one
                self._last[slot] = one
        return hit, predicted

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        nothing = None if self._seen else f"no values are recorded; it needs {self.needs}"
        return super().missing(scene) or nothing

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} confidently predicts class "
            f"{self.streak.worst[slot]:.0f} for every recorded sample in "
            f"{self.streak.records[slot] + self.patience - 1} records."
        )


def _one_class(values: NDArray[Any] | None, surety: float) -> int:
    """Returns the class that is confidently predicted for all samples [n, classes]; -1 if none."""
    if values is None or len(values) < _FEWEST or np.isnan(values).any():
        return -1
    outputs = np.asarray(values, np.float64)
    if outputs.size == len(outputs):  # one logit per sample
        outputs = np.stack((np.zeros(len(outputs)), outputs.reshape(-1)), axis=1)
    if outputs.ndim != 2:
        return -1
    predicted = outputs.argmax(1)
    chance = 1 / outputs.shape[1]
    if (predicted != predicted[0]).any() or chance == 1:
        return -1
    sure = (_probabilities(outputs)[:, predicted[0]].mean() - chance) / (1 - chance)
    return int(predicted[0]) if sure >= surety else -1


def _probabilities(outputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the softmax of predictions [n, classes], unless they are probabilities already."""
    if (outputs >= 0).all() and np.allclose(outputs.sum(1), 1, atol=1e-3):
        return outputs
    power = np.exp(np.clip(outputs - outputs.max(1, keepdims=True), -700, 0))
    return np.asarray(power / power.sum(1, keepdims=True))
