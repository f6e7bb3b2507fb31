"""Outputs that become identical for all samples."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from comgra_decl.rules.api import (
    VARYING,
    Bools,
    Early,
    Finding,
    Fraction,
    Mask,
    Matrix,
    Measured,
    Numbers,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    computed_from_targets,
    grown,
    judging_models,
    per_run,
    predictions,
    target_pairs,
)

_FIRST = 5  # records whose median is the initial value


class CollapsingParameters(Patient):
    """Options of `collapsing_output`."""

    fall: Fraction = 0.1
    """Smallest allowed variation across the batch, relative to its initial value."""


class CollapsingOutput(SlotRule):
    """Outputs that become increasingly similar for all samples."""

    name = "collapsing_output"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the relative variation of a tensor across the batch is "
        f"below `fall` times its initial value (the median over the first {_FIRST} records), in "
        "every iteration of its module. For "
        "each recorded statistic, the relative variation is the standard deviation across the "
        "samples divided by the largest magnitude; the rule uses the statistic with the largest "
        "relative variation. In addition, the largest of these standard deviations must not "
        "exceed its initial value. Without this condition, the rule would report tensors that "
        "start near zero and gain an offset, although they still distinguish the samples. "
        "Alternatively, an "
        "output that the model returns, and that no loss compares with a target, has shrunk to "
        "less than `fall` times its initial l2 norm. Such an output no longer distinguishes the "
        "samples. For example, the posterior of an autoencoder may collapse to its prior; if no "
        "loss contains a divergence, such a finding is a hint. A "
        "prediction is ignored while its standard deviation is at least `fall` times that of a "
        "floating-point target of the same size, which may become similar for all samples as well, "
        "such as the returns of a policy that always succeeds, but is not constant. The "
        "finding is only a hint if these tensors include neither a prediction nor an output of "
        "the model. It is also only a hint if they include only outputs of a model that judges "
        "another one (a step has several losses, and gradients flow from this model to the other "
        "one), because such outputs become similar if the other model, such as a generator, does "
        "well."
    )
    source = (
        "comgra's README, which announces a check for a falling variance across the batch; the "
        "generator that repeats itself in the book chapter 'Debugging: Visualizing Activation Maps "
        "& Gradients'."
    )
    advice = (
        "For a generator, balance the two learning rates, or add noise, a gradient penalty or "
        "minibatch statistics. Otherwise check whether the weight decay is too high, or whether a "
        "constant output solves the task, as in representation learning without negative samples."
    )
    explained_by = (
        "nonfinite",
        "input_independence",
        "large_update",
        "growing_weight",
        "exploding_gradient",
        "saturated",
        "dead_units",
        "divergence_weight",
        "variance_as_scale",
        "deterministic_posterior",
    )
    explained_by_earlier = ("shrinking_weight",)
    Parameters = CollapsingParameters
    of_state, of_graph = True, True
    any_statistic, lowest = VARYING, True
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    fewest_samples = 4
    evidence = "share of its initial variation"

    _early = per_run(Early, _FIRST)
    _early_apart = per_run(Early, _FIRST)
    _first_size = per_run(Early, 1)
    _shrunk: Bools = np.zeros(0, np.bool_)
    _targets: dict[int, int] = per_run(dict)  # slots of predictions and their targets

    _several = False  # whether a step has several losses

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Record whether steps have several losses."""
        self._several = self._several or numbers.name.startswith("loss[")

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs with a batch dimension."""
        self._targets = {
            prediction.id: target.id
            for prediction, target in target_pairs(self.scene)
            if prod(prediction.shape) == prod(target.shape) and "float" in target.dtype
        }
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the variation across the batch divided by its initial value."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        share = most / self._early.look(at, most)
        apart = window.deviation(at)
        grown_apart = apart > self._early_apart.look(at, apart)
        follows = self._follows_target(window, at, apart)
        fallen = (share < self.parameters.fall) & ~grown_apart & ~follows
        if window.has("l2"):
            size = window.read("l2", at).astype(np.float64)
            left = size / self._first_size.look(at, size)
            small = (left < self.parameters.fall) & window.table.remembered(
                CollapsingOutput, _codes
            )[at]
            self._shrunk = grown(self._shrunk, len(window.table), fill=False)
            self._shrunk[at] |= (small & ~fallen).any(0)
            share, fallen = np.where(small & ~fallen, left, share), fallen | small
        return fallen, share

    def _follows_target(self, window: Window, at: Slots, apart: Matrix) -> Mask:
        """Return where a prediction still varies about as much as its target."""
        follows = np.zeros(apart.shape, np.bool_)
        for prediction, target in self._targets.items():
            wanted = window.deviation(np.array([target]))
            columns = np.flatnonzero(at == prediction)
            follows[:, columns] = (wanted > 0) & (
                apart[:, columns] >= self.parameters.fall * wanted
            )
        return follows

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out losses of individual samples, and predictions that may be small."""
        fired = self.in_every_iteration(scene, fired)
        fired = fired[~np.isin(fired, list(computed_from_targets(scene)))]
        compared = predictions(scene) if any(target_pairs(scene)) else set()
        shrunk = grown(self._shrunk, len(scene.table), fill=False)
        return fired[~(shrunk[fired] & np.isin(fired, list(compared)))]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if it concerns only tensors inside the model."""
        found = super().findings(scene)
        if not found:
            return []
        if self._are_no_codes(scene) and self.parameters.severity is None:
            return [replace(found[0], severity="hint")]
        final = predictions(scene) | set(np.flatnonzero(_codes(scene.table)).tolist())
        judges = judging_models(scene) if self._several else set()
        roots = {str(m["node"]) for m in scene.documents.get("modules") or [] if not m["path"]}
        outer = [
            slot
            for slot in self.chosen(scene, self.streak.lasting).tolist()
            if (slot in final or scene.table.infos[slot].key.node in roots)
            and scene.table.infos[slot].key.node.partition(".")[0] not in judges
        ]
        if outer or self.parameters.severity is not None:
            return found
        return [replace(found[0], severity="hint")]

    def _are_no_codes(self, scene: Scene) -> bool:
        """Return whether the tensors have only shrunk, and the model has no posterior."""
        at = self.chosen(scene, self.streak.lasting)
        shrunk = grown(self._shrunk, len(scene.table), fill=False)
        return bool(shrunk[at].all()) and not any(scene.terms("divergence"))

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Return whether another finding explains this one; it must not have begun later."""
        return super().follows(finding, other) and other.first_step <= finding.first_step

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        if slot < len(self._shrunk) and self._shrunk[slot]:
            return (
                f"{scene.table.place(slot)} collapses: for all samples, it has shrunk to "
                f"{self.streak.worst[slot]:.1%} of its initial norm and no longer distinguishes "
                "them."
            )
        return (
            f"{scene.table.place(slot)} becomes identical for all samples: its variation across "
            f"the batch has fallen to {self.streak.worst[slot]:.1%} of its initial value."
        )


def _codes(table: SlotTable) -> Mask:
    """Return the additional outputs of a model, such as a mean and a variance."""
    return table.where(lambda i: i.key.role.startswith("output[") or i.key.role.count(".") > 0)
