"""Gradients that grow on their way to the first layers, or over training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Early,
    Factor,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)


class ExplodingParameters(Patient):
    """What can be said of `exploding_gradient`."""

    patience: Count = 2
    """For so many records in a row it must be so."""

    growth: Factor = 100.0
    """So many times what all gradients together, and this one, were at first is too much."""

    ratio: Factor = 1000.0
    """So many times the largest gradient near the loss is too much."""


class ExplodingGradient(SlotRule):
    """Gradients that grow on their way to the first layers, or over training."""

    name = "exploding_gradient"
    severity = "error"
    certainty = 0.6
    definition = (
        "For `patience` records, the l2 norm of a gradient is `ratio` times the largest of those "
        "nearest to the loss (the last quarter of the network); or both it and the norm of all "
        "gradients together are `growth` times what they were at first (median of five records)."
    )
    source = (
        "TheDeepChecker (doubling at five checks in a row), AutoTrainer (norm of the first layer "
        "70 times that of the last); wider here, and relative to the run itself, since healthy "
        "trainings begin with small gradients at layers whose successors start at zero."
    )
    advice = (
        "Lower the learning rate or warm it up, clip the gradient norm (about 1), and check the "
        "initialisation of this layer; in recurrent networks, use gates or shorter sequences."
    )
    explained_by = ("nonfinite", "poor_initialisation", "accumulated_gradient")
    Parameters = ExplodingParameters
    statistics = ("l2",)
    backwards, evidence = True, "times too large"
    needs = "gradients, such as {select: '**', capture: [output_grad]}"

    _early = per_run(Early, 5)
    _early_total = per_run(Early, 5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the gradients of outputs, or else of weights."""
        return table.layer_gradients

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with the other gradients of the step, and with those of the first steps."""
        size = window.read("l2", at).astype(np.float64)
        known = np.where(np.isfinite(size) & (size > 0), size, np.nan)
        there = (~np.isnan(known)).sum(1)
        total = np.sqrt(np.nansum(known**2, axis=1, keepdims=True))
        total[there == 0] = np.nan
        all_grew = total / self._early_total.look(np.zeros(1, np.int64), total)
        grew = np.fmin(known / self._early.look(at, known), all_grew) / self.parameters.growth
        near = window.table.remembered((ExplodingGradient, len(at)), lambda t: _near(t, at))
        away = known / np.fmax.reduce(np.where(near, known, np.nan), axis=1, keepdims=True)
        away = np.where(there[:, None] >= 4, away, np.nan)
        excess = np.fmax(np.nan_to_num(grew), np.nan_to_num(away) / self.parameters.ratio)
        return excess > 1, excess

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says by how much it is too large."""
        return (
            f"The gradient explodes: at {scene.table.place(slot)} it is "
            f"{self.streak.worst[slot]:.3g} times over the limit (step "
            f"{self.streak.worst_step[slot]})."
        )


def _near(table: SlotTable, at: Slots) -> NDArray[np.bool_]:
    """Returns which slots belong to the last quarter of the network."""
    order = table.order[at]
    return np.asarray(order >= np.quantile(order, 0.75))
