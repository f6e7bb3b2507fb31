"""Targets that reveal problems in the order, balance or variety of the data."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    ClassCounts,
    Count,
    Factor,
    Field,
    Finding,
    Int,
    LossCall,
    Mask,
    Measured,
    Patient,
    Rule,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    target_of,
)

_NEEDS = "targets, recorded where a loss compares them with predictions"


class SingleClass(SlotRule):
    """Batches in which all targets are the same."""

    name = "single_class"
    severity = "error"
    certainty = 0.8
    definition = (
        "For `patience` records in a row, all targets in a batch of at least "
        f"{ClassCounts.fewest} samples have the same value. In a hand-written loss, an operand "
        "counts as a target only if it contains integers, and that of `margin_ranking_loss` never "
        "does. Class 0 is ignored if no model "
        "returned the prediction: in contrastive losses, the first similarity is the correct one. "
        "Several losses in a step that each have a single class, but not all the same one, are not "
        "reported either: in adversarial training, a batch is real or generated."
    )
    source = (
        "The labels 0, 0, 0, 0, 0 of the frozen ResNet in the book chapter 'Debugging: Visualizing "
        "Activation Maps & Gradients'."
    )
    advice = "Shuffle the data, and check how the labels are created."
    statistics = ("mean",)
    fewest_samples = ClassCounts.fewest
    lowest, evidence = True, "deviation between samples"
    needs = _NEEDS

    def wants(self, table: SlotTable) -> Mask:
        """Return targets with one value per sample."""
        return table.scalar_targets

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the standard deviation across samples is zero."""
        deviation = window.read("mean", at, "std")
        calls = {target_of(self.scene, call): call for call in self.scene.calls}
        doubtful = {slot for slot, call in calls.items() if not _has_targets(call)}
        pairs = {slot for slot, call in calls.items() if call.prediction_key is not None}
        known = np.array([slot not in doubtful for slot in at.tolist()], np.bool_)
        first = np.array([slot in pairs for slot in at.tolist()], np.bool_)
        mean = window.read("mean", at)
        single = (deviation == 0) & known
        classes = np.where(single, mean, np.nan)
        one = ~(np.fmax.reduce(classes, 1) > np.fmin.reduce(classes, 1)) if len(at) else True
        return single & ~((mean == 0) & first) & np.reshape(one, (-1, 1)), np.asarray(deviation)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return f"All samples in the batch have the same target ({scene.table.place(slot)})."


def _has_targets(call: LossCall) -> bool:
    """Return whether the target of a call really is a target, not just another term of a loss.

    The target of a ranking loss only states which of two scores should be larger.
    """
    if call.function == "margin_ranking_loss":
        return False
    return not call.is_operator or call.target.is_integer


class OrderParameters(Patient):
    """Options of `unshuffled`."""

    patience: Count = 1
    """Has no effect; all records are considered."""

    ratio: Factor = 6.0
    """Largest allowed variance of the batch means, relative to that of shuffled data."""

    least: Annotated[Int, Field(ge=5)] = 10
    """Number of records required."""


class Unshuffled(Rule):
    """Batches that differ from each other more than expected by chance."""

    name = "unshuffled"
    certainty = 0.65
    definition = (
        "Over at least `least` records of class targets, the variance of the batches' mean "
        "targets is more than `ratio` times the value expected for shuffled data. The expected "
        "value is the mean variance within a batch divided by the batch size. The ratio of the "
        "two is the F statistic of an analysis of variance. The targets of different losses are "
        "checked separately, and only batches with the same shape per sample are compared."
    )
    source = (
        "Our own definition; the book chapter 'Debugging: Visualizing Activation Maps & Gradients' "
        "mentions missing shuffling."
    )
    advice = "Use DataLoader(..., shuffle=True), or shuffle before splitting the data into batches."
    explained_by = ("single_class",)
    Parameters = OrderParameters

    # by slot, function and classes of its loss, then by the shape of a sample:
    # sums of 1, mean, mean^2 and variance / size
    _sums: dict[tuple[int, str, int], dict[tuple[int, ...], NDArray[np.float64]]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Add up the means and variances of the batches."""
        if not window.has("mean"):
            return
        for slot in np.flatnonzero(window.table.targets).tolist():
            if "int" not in window.table.infos[slot].dtype:
                continue  # batches of other targets (returns, soft labels, ...) may differ
            at = np.array([slot])
            mean = window.read("mean", at)[:, 0].astype(np.float64)
            within = window.read("mean", at, "std")[:, 0].astype(np.float64) ** 2
            size = window.samples(at)[:, 0]
            there = np.isfinite(mean) & np.isfinite(within) & (size >= ClassCounts.fewest)
            key = window.table.infos[slot].key
            for row in np.flatnonzero(there).tolist():
                m, v, n = mean[row], within[row], size[row]
                calls = self.scene.calls_of(window.facts[row]) if window.facts else []
                call = next((c for c in calls if c.target_key == key), None)
                task = ("", 0) if call is None else (call.function, call.classes)
                shape = window.shape(row, slot)[1:]  # of one target
                sums = self._sums.setdefault((slot, *task), {}).setdefault(shape, np.zeros(4))
                sums += (1, m, m * m, v / (n - 1))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first target that is not shuffled."""
        for (slot, function, _), by_shape in self._sums.items():
            n, total, squares, chance = np.array([*by_shape.values()]).T
            other = bool(scene.calls) and function not in CLASSIFICATION
            freedom = n.sum() - len(n)
            if other or freedom + 1 < self.parameters.least or chance.sum() <= 0:
                continue
            between = (squares - total**2 / n).sum() / freedom
            ratio = between / (chance.sum() / n.sum())
            if ratio > self.parameters.ratio:
                place = scene.table.place(slot)
                return [
                    self.finding(
                        scene,
                        place=place,
                        first_step=0,
                        message="Batches are not shuffled: the variance of the batch means of "
                        f"{place} is {ratio:.3g} times the value expected for shuffled data.",
                        evidence={"ratio": float(ratio), "batches": int(n.sum())},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not self._sums:
            return f"no target of at least {ClassCounts.fewest} samples was recorded"
        most = max(
            sum(sums[0] - 1 for sums in by_shape.values()) + 1 for by_shape in self._sums.values()
        )
        least = self.parameters.least
        if most >= least:
            return None
        return f"it needs {least} records with targets of one shape; the run has {int(most)}"


class ImbalanceParameters(Patient):
    """Options of `class_imbalance`."""

    patience: Count = 5
    """Has no effect; all targets are considered."""

    ratio: Factor = 10.0
    """Largest allowed ratio between the frequencies of the most and least frequent classes."""

    least: Annotated[Int, Field(ge=10)] = 500
    """Number of targets required."""

    least_of_ended: Annotated[Int, Field(ge=10)] = 100
    """Number of targets required if the run has ended; below `least`, `ratio` is doubled."""


class ClassImbalance(Rule):
    """Classes with very different frequencies."""

    name = "class_imbalance"
    severity = "hint"
    certainty = 0.5
    definition = (
        "Over at least `least` recorded targets (integers, one per sample), the most frequent "
        "class occurs more than `ratio` times as often as the least frequent class. Classes that "
        "never occur are ignored. If the run has ended, `least_of_ended` targets are sufficient. "
        "In that case, `ratio` is doubled if there are fewer than `least` targets."
    )
    source = "SageMaker Debugger, which requires a ratio of 10 after 500 labels."
    advice = "Weight the loss by class, or sample rare classes more often. Do not rely on accuracy."
    explained_by = ("single_class",)
    Parameters = ImbalanceParameters

    def look(self, window: Window) -> None:
        """Count the classes in the histograms of targets."""
        self.scene.count_classes(window)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first target whose classes are not balanced."""
        tokens = {goal for _, goal in scene.next_tokens.tokens}  # words are never balanced
        for slot, counts in scene.classes.by_slot.items():
            known = {c: n for c, n in counts.items() if c >= 0 < n and slot not in tokens}
            total = sum(known.values())
            if total < self._needed(scene) or len(known) < 2:
                continue
            limit = self.parameters.ratio * (1 if total >= self.parameters.least else 2)
            most, rarest = max(known, key=lambda c: known[c]), min(known, key=lambda c: known[c])
            ratio = known[most] / known[rarest]
            if ratio > limit:
                return [
                    self.finding(
                        scene,
                        place=scene.table.place(slot),
                        first_step=0,
                        message=f"Class {most} occurs {ratio:.3g} times as often as class "
                        f"{rarest} ({known[most]} and {known[rarest]} of {sum(known.values())} "
                        "targets).",
                        evidence={"ratio": ratio, "targets": sum(known.values())},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not scene.has_histograms:
            return "no histograms are recorded; set `histogram: {bins: 64}`"
        if not scene.classes.by_slot:
            fewest = ClassCounts.fewest
            return f"no batch of at least {fewest} class targets was recorded"
        most, least = scene.classes.most, self._needed(scene)
        return None if most >= least else f"it needs {least} targets; the run has {most}"

    def _needed(self, scene: Scene) -> int:
        """Return the number of targets required, depending on whether the run has ended."""
        least, of_ended = self.parameters.least, self.parameters.least_of_ended
        return int(min(least, of_ended) if scene.ended else least)
