"""Units that do next to nothing beside the others of their layer."""

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
_FEWEST = 4  # units


class DormantParameters(SampledParameters):
    """What can be said of `dormant_units`."""

    every: Count = 20
    """Every so many records are looked at, since their values have to be read."""

    patience: Count = 1
    """For so many times in a row it must be so, each of `looks` of these records."""

    looks: Count = 10
    """Over so many of these records a unit's activity is averaged."""

    activity: Fraction = 0.025
    """A unit is dormant below this share of the mean activity of its layer's units."""

    share: Fraction = 0.5
    """More than this share of a layer's units are dormant."""


class DormantUnits(SampledRule):
    """Units that do next to nothing beside the others of their layer."""

    name = "dormant_units"
    severity = "hint"
    certainty = 0.5
    definition = (
        "Of an activation function's output, the mean magnitude of more than `share` of the units "
        "is below `activity` times the mean of all units of the layer; over the recorded samples "
        "of `looks` records, each `every`-th one. A unit is a channel of an image, else a place in "
        "the last dimension."
    )
    source = "Sokar et al., The Dormant Neuron Phenomenon (2023), whose threshold is 0.025."
    advice = (
        "A layer that does little with most of its units has lost capacity: lower the learning "
        "rate, add normalisation or weight decay, start such units anew, or make the layer smaller."
    )
    explained_by = ("nonfinite", "dead_units", "all_zero")
    Parameters = DormantParameters
    evidence, what = "share of dormant units", "activation"
    needs = "outputs of activation modules with `values: true`"

    _sums: dict[int, NDArray[np.float64]] = per_run(dict)
    _looks: dict[int, int] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of activation functions with several units."""
        return table.outputs & table.where(lambda i: i.module_class in _ACTIVATIONS)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Adds up activities; judges them whenever there are enough."""
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
        if known is None or known.shape != activity.shape:  # a length that changes has no units
            known, self._looks[slot] = np.zeros(activity.shape), 0
        self._sums[slot] = known + activity
        self._looks[slot] += 1

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        needed = self.parameters.every * (self.parameters.looks - 1) + 1
        few = f"it takes {needed} records of training steps; there are {scene.records}"
        return super().missing(scene) or (few if scene.records < needed else None)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how many there are."""
        return (
            f"{self.streak.worst[slot]:.0%} of the units of {scene.table.place(slot)} are dormant: "
            "they do next to nothing beside the others."
        )


def _activity(size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean magnitude of each unit, a channel of [N, C, H, W], over all the rest."""
    unit = 1 if size.ndim == 4 else size.ndim - 1
    return np.asarray(size.mean(axis=tuple(d for d in range(size.ndim) if d != unit)))
