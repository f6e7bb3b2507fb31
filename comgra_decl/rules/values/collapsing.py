"""Answers that become the same for all samples."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    VARYING,
    Early,
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
    per_run,
)


class CollapsingParameters(Patient):
    """What can be said of `collapsing_output`."""

    fall: Fraction = 0.1
    """The variation over the batch falls below this share of what it was at first."""


class CollapsingOutput(SlotRule):
    """Outputs that become more and more the same for all samples."""

    name = "collapsing_output"
    certainty = 0.6
    definition = (
        "The relative variation over the batch (the largest standard deviation of a recorded "
        "statistic of the samples, by its largest magnitude) of a tensor falls below `fall` of "
        "what it was at first (median of five records), for `patience` records."
    )
    source = (
        "comgra's plan (variance over the batch falls: collapse); the debugging chapter's "
        "generator that repeats itself."
    )
    advice = (
        "Of a generator: balance both learning rates, add noise, a gradient penalty or minibatch "
        "statistics. Else look for weight decay that is too strong, or a constant that solves the "
        "task, as in representations without negatives."
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
    Parameters = CollapsingParameters
    any_statistic, lowest = VARYING, True
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    fewest_samples = 4
    evidence = "share of its first variation"

    _early = per_run(Early, 5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of samples."""
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the variation over the batch with that of the first records."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        share = most / self._early.look(at, most)
        return share < self.parameters.fall, share

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses of single samples."""
        return fired[~np.isin(fired, list(computed_from_targets(scene)))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how little samples differ."""
        return (
            f"{scene.table.place(slot)} becomes the same for all samples: it varies over the batch "
            f"by {self.streak.worst[slot]:.1%} of what it did at first."
        )
