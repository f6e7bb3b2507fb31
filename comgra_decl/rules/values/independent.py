"""Outputs that are the same whatever the input is."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    VARYING,
    Bools,
    Fraction,
    Largest,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
    predictions,
)

_VARIED = 1e-2


class IndependentParameters(Patient):
    """What can be said of `input_independence`."""

    variation: Fraction = 1e-3
    """Below this relative variation over the batch, all samples are the same."""


class InputIndependence(SlotRule):
    """Outputs that are the same whatever the input is."""

    name = "input_independence"
    severity = "error"
    certainty = 0.7
    definition = (
        "Over the batch, no recorded statistic of a sample (mean, std, min, max, ...) varies by "
        "more than `variation` of its own size, for `patience` records; of what the network "
        "answers, or of a tensor that varied by a hundredth before."
    )
    source = (
        "comgra's plan (variance over the batch falls: collapse); TheDeepChecker's test of "
        "independence from the input."
    )
    advice = (
        "Follow the values from the input: somewhere samples become equal. Dead units, saturation, "
        "a learning rate that is too large, a batch mixed up, or an input that is not used."
    )
    explained_by = ("nonfinite", "dead_units", "saturated", "large_update", "growing_weight")
    Parameters = IndependentParameters
    any_statistic, lowest = VARYING, True
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    fewest_samples = 2
    evidence, of_graph = "relative variation over the batch", True

    _most = per_run(Largest)
    _final: Bools = np.zeros(0, np.bool_)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of samples; learns which of them are answers."""
        self._final = np.isin(np.arange(len(table)), list(predictions(self.scene)))
        return table.outputs & table.where(lambda i: i.batch_dim is not None)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks for the statistic that varies most."""
        most = window.variation(at)
        most = np.where(window.samples(at) >= self.fewest_samples, most, np.nan)
        varied = self._most.look(at, most) > _VARIED
        return (most < self.parameters.variation) & (varied | self._final[at]), most

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says that all samples are the same."""
        return (
            f"{scene.table.place(slot)} is the same for every sample of the batch (relative "
            f"variation {self.streak.worst[slot]:.1e}): it does not depend on the input."
        )
