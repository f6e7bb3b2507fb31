"""Outputs that become the same for all samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    VARYING,
    Bools,
    Early,
    Finding,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    computed_from_targets,
    grown,
    per_run,
    predictions,
    target_pairs,
)

_FIRST = 5  # records; their median is the initial value


class CollapsingParameters(Patient):
    """The options of `collapsing_output`."""

    fall: Fraction = 0.1
    """How far the variation over the batch may fall, relative to its first value."""


class CollapsingOutput(SlotRule):
    """Outputs that become increasingly similar for all samples."""

    name = "collapsing_output"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the relative variation of a tensor across the batch is "
        f"below `fall` times its initial value (median of the first {_FIRST} records). To compute "
        "it, each recorded statistic's standard deviation across the samples is divided by its "
        "largest magnitude; the largest such ratio counts. The largest of these standard "
        "deviations must not exceed its initial value either: a tensor that starts near zero "
        "gains an offset, yet distinguishes samples better than before. Or an output that the "
        "model returns, and that no loss compares with a target, has shrunk to less than `fall` of "
        "its initial l2 norm. Such a code no longer distinguishes samples, as when an "
        "autoencoder's posterior collapses to its prior. The finding is only a hint if these "
        "tensors include neither a prediction nor a model output."
    )
    source = (
        "comgra's README (planned: variance over the batch falls, collapse); the generator that "
        "repeats itself in the book chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "For a generator: balance the two learning rates, add noise, a gradient penalty or "
        "minibatch statistics. Otherwise look for too much weight decay, or a constant that solves "
        "the task, as in representation learning without negatives."
    )
    explained_by = (
        "nonfinite",
        "input_independence",
        "large_update",
        "growing_weight",
        "exploding_gradient",
        "saturated",
        "dead_units",
    )
    explained_by_earlier = ("shrinking_weight",)
    Parameters = CollapsingParameters
    of_state = True
    any_statistic, lowest = VARYING, True
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    fewest_samples = 4
    evidence = "share of its first variation"

    _early = per_run(Early, _FIRST)
    _early_apart = per_run(Early, _FIRST)
    _first_size = per_run(Early, 1)
    _shrunk: Bools = np.zeros(0, np.bool_)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs with a batch dimension."""
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the variation over the batch with its first value."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        share = most / self._early.look(at, most)
        apart = window.deviation(at)
        grown_apart = apart > self._early_apart.look(at, apart)
        fallen = (share < self.parameters.fall) & ~grown_apart
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

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses of single samples, and predictions that may be small."""
        fired = fired[~np.isin(fired, list(computed_from_targets(scene)))]
        compared = predictions(scene) if any(target_pairs(scene)) else set()
        shrunk = grown(self._shrunk, len(scene.table), fill=False)
        return fired[~(shrunk[fired] & np.isin(fired, list(compared)))]

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding; a hint if only tensors within the network become alike."""
        found = super().findings(scene)
        if not found:
            return []
        final = predictions(scene) | set(np.flatnonzero(_codes(scene.table)).tolist())
        roots = {str(m["node"]) for m in scene.documents.get("modules") or [] if not m["path"]}
        outer = [
            slot
            for slot in self.chosen(scene, self.streak.lasting).tolist()
            if slot in final or scene.table.infos[slot].key.node in roots
        ]
        if outer or self.parameters.severity is not None:
            return found
        return [replace(found[0], severity="hint")]

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Whether another finding explains it: one that began no later."""
        return super().follows(finding, other) and other.first_step <= finding.first_step

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        if slot < len(self._shrunk) and self._shrunk[slot]:
            return (
                f"{scene.table.place(slot)} collapses: for all samples, it has shrunk to "
                f"{self.streak.worst[slot]:.1%} of its first size and no longer tells them apart."
            )
        return (
            f"{scene.table.place(slot)} becomes the same for all samples: its variation over "
            f"the batch has fallen to {self.streak.worst[slot]:.1%} of its first value."
        )


def _codes(table: SlotTable) -> Mask:
    """Returns the outputs that a model returns beside others, such as mean and variance."""
    return table.where(lambda i: i.key.role.startswith("output[") or i.key.role.count(".") > 0)
