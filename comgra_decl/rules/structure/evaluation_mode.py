"""Training that continues in evaluation mode."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    NO_SLOTS,
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

_EXACT = 1e-4  # of the spread; the precision of a batch's float32 mean
_OFF = 2e-3  # of the spread; running means differ more from a batch's


class EvaluationModeParameters(Patient):
    """The options of `training_in_evaluation_mode`."""

    patience: Count = 5


class TrainingInEvaluationMode(SlotRule):
    """Training that continues in evaluation mode."""

    name = "training_in_evaluation_mode"
    severity = "error"
    certainty = 0.8
    definition = (
        "For `patience` records in a row, a Dropout module that dropped elements before returns "
        "its input unchanged. Or the mean of a BatchNorm module's output, which in training mode "
        f"equals the mean of its bias and did so before, differs from it by more than {_OFF:.1%} "
        "of the output's spread. Or training records have gradients but no forward pass in "
        "training mode, though earlier ones had."
    )
    source = (
        "Own derivation: sum((x - mean(x)) / std(x)) = 0. The usual cause is a forgotten "
        "model.train()."
    )
    advice = "Call model.train() after every evaluation, before the next training step."
    explained_by = ("nonfinite",)
    Parameters = EvaluationModeParameters
    statistics = ("mean", "std", "zero_fraction")
    evidence, of_graph = "distance from training mode", True
    needs = "outputs of Dropout or BatchNorm modules, with `graph: true` and parameters"

    _trained = per_run(Largest)
    _partner = NO_SLOTS

    def wants(self, table: SlotTable) -> Mask:
        """Returns Dropout modules with their inputs, and BatchNorm modules with their biases."""
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
        """Takes the next records; a module missing from the forward pass counts as a hit."""
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
        """Tells the two modes apart."""
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
        """Returns the message about a slot."""
        since = self.streak.since(slot)
        return (
            f"{since[0].upper()}{since[1:]}, training continues in evaluation mode: "
            f"{scene.table.place(slot)} behaves as in evaluation."
        )


def _is_bias(info: SlotInfo) -> bool:
    return info.kind == "parameter" and info.key.pass_ == "forward" and info.key.role == "bias"
