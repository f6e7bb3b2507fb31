"""A classifier that says one class of everything."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
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
    target_pairs,
)

_FEWEST = 4  # recorded samples


class OneAnswerParameters(Patient):
    """What can be said of `one_answer`."""

    patience: Count = 15
    """For so many records in a row it must be so; trainings often begin like this."""

    surety: Annotated[Number, Field(ge=0, lt=1)] = 0.5
    """So much of the way from guessing (0) to certainty (1) it must be."""


class OneAnswer(SlotRule):
    """A classifier that says one class of everything."""

    name = "one_answer"
    certainty = 0.65
    definition = (
        "The largest of the answers [N, classes] is that of one and the same class for all "
        "recorded samples (at least four) and for `patience` records, though the targets of the "
        "batch (integers) differ; and it is sure of it: the softmax of the answers gives that "
        "class at least `surety` of the way from 1 / classes to 1, in the mean of the samples. A "
        "network that has not made up its mind yet says one class, too, hardly above the others."
    )
    source = "The debugging chapter's network that says dog of everything; own limits."
    advice = (
        "Look at how frequent classes are, at the last bias, and at the learning rate; see whether "
        "the answers differ between samples at all (`input_independence`), and the labels."
    )
    explained_by = ("nonfinite", "input_independence", "single_class", "detached")
    Parameters = OneAnswerParameters
    statistics = ("mean",)
    evidence, of_graph = "class", True
    needs = "answers with `values: true`, and targets of classes, with `graph: true`"

    _last: dict[int, int] = per_run(dict)
    _seen = False
    _targets: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns answers [N, classes] that meet a target of classes."""
        self._targets = {
            answer.id: target.id
            for answer, target in target_pairs(self.scene)
            if "int" in target.dtype and "float" in answer.dtype
            if len(answer.shape) == 2 and len(target.shape) == 1 and answer.batch_dim == 0
        }
        return table.where(lambda info: info.id in self._targets)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks at the recorded samples."""
        said = np.full((len(window), len(at)), np.nan)
        hit = np.zeros(said.shape, np.bool_)
        for column, slot in enumerate(at.tolist()):
            target = np.array([self._targets[slot]])
            differ = window.read("mean", target, "std")[:, 0] > 0
            for row in range(len(window)):
                values = window.details.values(row, slot) if differ[row] else None
                self._seen = self._seen or values is not None
                one = _one_class(values, self.parameters.surety)
                hit[row, column] = one >= 0 and self._last.get(slot, one) == one
                said[row, column] = one
                self._last[slot] = one
        return hit, said

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        nothing = None if self._seen else f"no values are recorded; it needs {self.needs}"
        return super().missing(scene) or nothing

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says which class."""
        return (
            f"{scene.table.place(slot)} is sure of class {self.streak.worst[slot]:.0f} for every "
            f"recorded sample, for {self.streak.records[slot] + self.patience - 1} records."
        )


def _one_class(values: NDArray[Any] | None, surety: float) -> int:
    """Returns the class that all samples [n, classes] surely are said to be; -1 if none is."""
    if values is None or values.ndim != 2 or len(values) < _FEWEST or np.isnan(values).any():
        return -1
    answers = np.asarray(values, np.float64)
    said = answers.argmax(1)
    chance = 1 / answers.shape[1]
    if (said != said[0]).any() or chance == 1:
        return -1
    sure = (_probabilities(answers)[:, said[0]].mean() - chance) / (1 - chance)
    return int(said[0]) if sure >= surety else -1


def _probabilities(answers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the softmax of answers [n, classes], unless they are probabilities already."""
    if (answers >= 0).all() and np.allclose(answers.sum(1), 1, atol=1e-3):
        return answers
    power = np.exp(np.clip(answers - answers.max(1, keepdims=True), -700, 0))
    return np.asarray(power / power.sum(1, keepdims=True))
