"""Units that are hardly active compared with the rest of their layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    RECTIFIERS,
    Count,
    Fraction,
    Mask,
    Measured,
    SampledParameters,
    SampledRule,
    Scene,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_ACTIVATIONS = (*RECTIFIERS, "LeakyReLU", "ELU", "GELU", "SiLU", "Mish", "Softplus")
_FEWEST = 4  # minimum number of units


class DormantParameters(SampledParameters):
    """Options of `dormant_units`."""

    every: Count = 20
    """Number of records between two checks. Not every record is checked, because reading values
    from the store takes time.
    """

    patience: Count = 1
    """Number of consecutive groups of `looks` checked records that must meet the condition."""

    looks: Count = 10
    """Number of checked records over which a unit's activity is averaged."""

    activity: Fraction = 0.025
    """Smallest activity of a unit that is not dormant, relative to the mean of its layer."""

    share: Fraction = 0.5
    """Largest allowed share of dormant units in a layer."""


class DormantUnits(SampledRule):
    """Units that are hardly active compared with the rest of their layer."""

    name = "dormant_units"
    severity = "hint"
    certainty = 0.5
    definition = (
        "More than `share` of the units in the output of an activation function are dormant. A "
        "unit is dormant if its mean magnitude is below `activity` times the mean over all units "
        "of the layer. Magnitudes are averaged over the recorded samples in `looks` records, taken "
        "at intervals of `every` records. A unit is a channel of an image, or an index of the last "
        "dimension for other tensors."
    )
    source = "Sokar et al., The Dormant Neuron Phenomenon (2023), who use a threshold of 0.025."
    advice = (
        "A layer with many dormant units has lost capacity. Lower the learning rate, add "
        "normalization or weight decay, reinitialize these units, or make the layer smaller."
    )
    explained_by = ("nonfinite", "dead_units", "all_zero")
    Parameters = DormantParameters
    of_state = True
    evidence, what = "share of dormant units", "activation"
    needs = "outputs of activation modules with `values: true`"

    _sums: dict[int, NDArray[np.float64]] = per_run(dict)
    _looks: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Return the outputs of activation functions."""
        return table.outputs & table.where(lambda i: i.module_class in _ACTIVATIONS)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Add up activities and check the totals once there are enough."""
        share = np.full((len(window), len(at)), np.nan)
        for row, column, values in self.measured(window, at):
            slot = int(at[column])
            activity = _activity(np.abs(values))
            if len(activity) < _FEWEST:
                continue
            self._add(slot, activity)
            if self._looks[slot] == self.parameters.looks:
                mean = self._sums.pop(slot)
                share[row, column] = (mean <= self.parameters.activity * mean.mean()).mean()
        return share > self.parameters.share, share

    def _add(self, slot: int, activity: NDArray[np.float64]) -> None:
        known = self._sums.get(slot)
        # a different length means different units
        if known is None or known.shape != activity.shape:
            known, self._looks[slot] = np.zeros(activity.shape), 0
        self._sums[slot] = known + activity
        self._looks[slot] += 1

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        needed = self.parameters.every * (self.parameters.looks - 1) + 1
        few = f"it needs {needed} training records; the run has {scene.records}"
        return super().missing(scene) or (few if scene.records < needed else None)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{self.streak.worst[slot]:.0%} of the units of {scene.table.place(slot)} are dormant: "
            "they are hardly active compared with the others."
        )


def _activity(size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean magnitude of each unit, for example of each channel of [N, C, H, W]."""
    unit = 1 if size.ndim == 4 else size.ndim - 1
    return np.asarray(size.mean(axis=tuple(d for d in range(size.ndim) if d != unit)))
