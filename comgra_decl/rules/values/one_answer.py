"""Classifiers that predict the same class for every sample."""

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

_FEWEST = 4  # minimum number of recorded samples


class OneAnswerParameters(Patient):
    """Options of `one_answer`."""

    patience: Count = 15
    """Number of consecutive records that must meet the condition. The default is high because many
    runs start like this.
    """

    surety: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """Smallest confidence of the prediction, from 0 (guessing) to 1 (certain)."""


class OneAnswer(SlotRule):
    """A classifier that predicts the same class for every sample."""

    name = "one_answer"
    certainty = 0.65
    definition = (
        "For `patience` records in a row, the predictions for all recorded samples (at least "
        f"{_FEWEST}) favour the same class although the targets in the batch differ. Predictions "
        "can have the shape [N, classes] (cross-entropy or negative log-likelihood) or consist "
        "of one logit per sample (binary cross-entropy). In addition, the mean confidence in that "
        "class is at least `surety`, on a scale from 0 (a softmax probability of 1 / classes) to 1 "
        "(a probability of 1). An untrained model also predicts a single class, but only by a "
        "small margin."
    )
    source = (
        "The network that predicts 'dog' for every image in the book chapter 'Debugging: "
        "Visualizing Activation Maps & Gradients'; our own limits."
    )
    advice = (
        "Check the class frequencies, the bias of the last layer, the learning rate and the "
        "labels. Also check whether the predictions differ between samples (`input_independence`)."
    )
    explained_by = (
        "nonfinite",
        "input_independence",
        "single_class",
        "detached",
        "inverted_weights",
    )
    Parameters = OneAnswerParameters
    of_state = True
    statistics = ("mean",)
    evidence, of_graph, of_calls = "class", True, True
    needs = "predictions with `values: true`, and class targets, with `graph: true`"

    _last: dict[int, int] = per_run(dict)
    _seen = False
    _targets: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Return predictions [N, classes] that are compared with class targets."""
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
        if not self.scene.calls:  # recorded before loss calls were stored
            self._targets = {
                prediction.id: target.id
                for prediction, target in target_pairs(self.scene)
                if "int" in target.dtype and "float" in prediction.dtype
                if len(prediction.shape) == 2 and len(target.shape) == 1
            }
        return table.where(lambda info: info.id in self._targets)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the class predicted for all recorded samples, where there is one."""
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
        """Return the reason why the run could not be checked, or None."""
        nothing = None if self._seen else f"no values are recorded; it needs {self.needs}"
        return super().missing(scene) or nothing

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} confidently predicts class "
            f"{self.streak.worst[slot]:.0f} for every recorded sample in "
            f"{self.streak.records[slot] + self.patience - 1} records."
        )


def _one_class(values: NDArray[Any] | None, surety: float) -> int:
    """Return the class that is confidently predicted for all samples [n, classes]; -1 if none."""
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
    """Return the softmax of predictions [n, classes], unless they already are probabilities."""
    if (outputs >= 0).all() and np.allclose(outputs.sum(1), 1, atol=1e-3):
        return outputs
    power = np.exp(np.clip(outputs - outputs.max(1, keepdims=True), -700, 0))
    return np.asarray(power / power.sum(1, keepdims=True))
