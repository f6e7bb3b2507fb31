"""Outputs that become the same for all samples."""

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

_FIRST = 5  # records; their median is the start value


class CollapsingParameters(Patient):
    """The options of `collapsing_output`."""

    fall: Fraction = 0.1
    """How far the variation over the batch may fall, relative to its first value."""


class CollapsingOutput(SlotRule):
    """Outputs that become more and more alike for all samples."""

    name = "collapsing_output"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the relative variation of a tensor over the batch is "
        f"below `fall` times its first value (median of {_FIRST} records). The relative variation "
        "is the largest standard deviation over the batch of any recorded statistic of the "
        "samples, divided by the largest magnitude of that statistic."
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

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs with a batch dimension."""
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the variation over the batch with its first value."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        share = most / self._early.look(at, most)
        return share < self.parameters.fall, share

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses of single samples."""
        return fired[~np.isin(fired, list(computed_from_targets(scene)))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} becomes the same for all samples: its variation over "
            f"the batch has fallen to {self.streak.worst[slot]:.1%} of its first value."
        )
