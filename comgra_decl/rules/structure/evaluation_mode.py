"""Trainings that go on in evaluation mode."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Largest,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    single_sources,
)

_EXACT = 1e-4  # of the spread: float32 means of a batch are good to that
_OFF = 2e-3  # of the spread: running means differ from a batch's by more


class EvaluationModeParameters(Patient):
    """What can be said of `training_in_evaluation_mode`."""

    patience: Count = 5
    """For so many records in a row it must be so."""


class TrainingInEvaluationMode(SlotRule):
    """Trainings that go on in evaluation mode."""

    name = "training_in_evaluation_mode"
    severity = "error"
    certainty = 0.8
    definition = (
        "A Dropout module that dropped elements before returns exactly what enters it, for "
        "`patience` records of the training; or the mean of what a BatchNorm module returns, which "
        "is exactly the mean of its bias in training mode and was so before, is off by more than "
        "0.2 % of its spread; or records of the training have gradients and no forward pass that "
        "was made in training mode, though they had before."
    )
    source = "Own derivation: sum((x - mean(x)) / std(x)) = 0. A forgotten model.train()."
    advice = "Call model.train() after each evaluation, before the next training step."
    explained_by = ("nonfinite",)
    Parameters = EvaluationModeParameters
    statistics = ("mean", "std", "zero_fraction")
    evidence, of_graph = "distance from training mode", True
    needs = "outputs of Dropout or BatchNorm modules, with `graph: true` and parameters"

    _trained = per_run(Largest)
    _partner: Slots = np.zeros(0, np.int64)

    def wants(self, table: SlotTable) -> Mask:
        """Returns Dropouts with what enters them, and BatchNorms with their biases."""
        self._partner = np.full(len(table), -1, np.int64)
        sources = single_sources(self.scene)
        bias = {i.key.node: i.id for i in table.infos if _is_bias(i)}
        for slot in np.flatnonzero(table.outputs).tolist():
            info = table.infos[slot]
            if info.key.role == "output" and "Dropout" in info.module_class:
                self._partner[slot] = sources[slot]
            elif info.key.role == "output" and info.module_class.startswith("BatchNorm"):
                self._partner[slot] = bias.get(info.key.node, -1)
        return self._partner >= 0

    def _take(self, window: Window) -> None:
        """Counts as hit, too, where a module is in no forward pass of a training any more."""
        at = self.columns(window.table)
        if not window.has(*self.statistics) or not len(at) or not len(window):
            return
        with np.errstate(all="ignore"):
            hit, evidence = self.measure(window, at)
        there = window.present[:, at]
        trained = window.present[:, window.table.parameter_gradients].any(1, keepdims=True)
        been = self._trained.look(at, np.full(there.shape, np.nan)) == 1
        gone = ~there & ~window.present[:, window.table.computed].any(1, keepdims=True) & trained
        hit |= gone & been
        evidence = np.where(gone, 1.0, evidence)
        self.streak.look(window.steps, at, hit=hit, present=there | gone, evidence=evidence)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Tells both modes apart."""
        partner = self._partner[at]
        norm = window.table.parameters[partner]
        zeros = window.read("zero_fraction", at) - window.read("zero_fraction", partner)
        mean = window.read("mean", at).astype(np.float64)
        off = np.abs(mean - window.read("mean", partner))
        spread = np.hypot(window.read("std", at), window.read("mean", at, "std"))
        distance = np.where(spread > 0, off / spread, np.nan)
        training = np.where(norm, distance < _EXACT, zeros > 0)
        other = np.where(norm, distance > _OFF, (zeros == 0) & (off == 0))
        been = self._trained.look(at, np.where(training, 1.0, np.nan))
        return other & (been == 1), np.where(norm, distance, 1.0)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says since when."""
        return (
            f"From step {self.streak.first[slot]} on the training goes on in evaluation mode: "
            f"{scene.table.place(slot)} does what it does in evaluations."
        )


def _is_bias(info: SlotInfo) -> bool:
    return info.kind == "parameter" and info.key.pass_ == "forward" and info.key.role == "bias"
