"""Activations whose size goes wrong with depth, or over training."""

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
    Positive,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    computed_from_targets,
    per_run,
    predictions_and_logits,
    row_quantile,
)


class InitialisationParameters(Patient):
    """What can be said of `poor_initialisation`."""

    patience: Count = 3
    """For so many records in a row it must be so."""

    within: Count = 10
    """So many first records are looked at."""

    ratio: Factor = 30.0
    """A layer whose spread is so many times that of all layers, or so small a part, is odd."""

    small: Positive = 0.01
    """A network whose layers have a median spread below this is odd."""


class PoorInitialisation(SlotRule):
    """Layers whose outputs begin far too large or far too small."""

    name = "poor_initialisation"
    certainty = 0.65
    definition = (
        "In the first `within` records, the standard deviation of a layer with weights is above "
        "`ratio` times the median of the network's layers or below 1 / `ratio`^2 of it; or above "
        "`ratio` itself and a third of `ratio` times the smallest of the layers before it; or that "
        "median is below `small`; for `patience` records."
    )
    source = (
        "SageMaker Debugger (largest to smallest variance of layers above 10), TheDeepChecker "
        "(deviation outside 0.5 .. 2); wider, since heads often begin small."
    )
    advice = (
        "Initialise by He (ReLU) or Glorot (tanh), scale residual branches by 1 / sqrt(depth), and "
        "normalise inputs."
    )
    explained_by = ("nonfinite", "input_scale")
    Parameters = InitialisationParameters
    statistics = ("std",)
    evidence = "times too large"
    needs = "outputs of layers with weights, {select: '**', capture: [output]}"

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of modules that have weights with at least two dimensions."""
        nodes = {i.key.node for i in table.infos if i.kind == "parameter" and len(i.shape) > 1}
        return table.outputs & table.where(
            lambda i: i.key.node in nodes and i.key.role == "output" and not _embeds(i.module_class)
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the layers of a step."""
        limit = self.parameters.ratio
        spread = window.read("std", at).astype(np.float64)
        elements = window.elements(at) > 1
        spread = np.where((spread > 0) & elements, spread, np.nan)
        middle = row_quantile(spread, 0.5)
        jump = spread / _before(spread, window.table.order[at]) * 3
        large = np.fmax(spread / middle, np.fmin(spread, jump)) / limit
        small = np.where(middle < self.parameters.small, self.parameters.small / middle, 0.0)
        excess = np.fmax(np.fmax(large, small), middle / (spread * limit**2))
        early = window.first + np.arange(len(window)) < self.parameters.within
        return (excess > 1) & early[:, None], excess * limit

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says that it is odd from the start."""
        return (
            f"{scene.table.place(slot)} begins {self.streak.worst[slot]:.3g} times too large or "
            "too small for its network."
        )


class DriftParameters(Patient):
    """What can be said of `activation_drift`."""

    patience: Count = 3
    """For so many records in a row it must be so."""

    growth: Factor = 100.0
    """So many times its first size is too much."""

    fall: Factor = 1000.0
    """So small a part of its first size is too little."""


class ActivationDrift(SlotRule):
    """Activations that grow without end or fade away over training."""

    name = "activation_drift"
    certainty = 0.5
    definition = (
        "The standard deviation of a tensor (over its elements, or over the batch if larger) is "
        "`growth` times what it was at first (median of five records), or 1 / `fall` of it, for "
        "`patience` records. What began smaller than half of the network's outputs may grow to "
        "`growth` times their median, as branches do that begin at zero. Answers and their logits "
        "are left out, which may become as large as they like, and so are losses."
    )
    source = "comgra's plan (unbounded growth of variance); TheDeepChecker's growth rates."
    advice = (
        "Normalise (LayerNorm, RMSNorm), add weight decay, or lower the learning rate; a tensor "
        "that fades may be cut off by regularisation or by a gate that closed."
    )
    explained_by = ("nonfinite", "growing_weight", "large_update", "loss_diverges", "dead_units")
    Parameters = DriftParameters
    statistics = ("std",)
    evidence = "times its first size"
    needs = "outputs, {select: '**', capture: [output]}"

    _early = per_run(Early, 5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs."""
        return table.outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with what it was at first."""
        spread = window.read("std", at).astype(np.float64)
        if window.has("mean"):
            spread = np.fmax(spread, window.read("mean", at, "std"))
        spread = np.where(np.isfinite(spread) & (spread > 0), spread, np.nan)
        early = np.where(np.isnan(spread), np.nan, self._early.look(at, spread))
        growth = spread / np.fmax(early, row_quantile(early, 0.5))
        fall = early / spread
        hit = (growth > self.parameters.growth) | (fall > self.parameters.fall)
        return hit, np.fmax(growth, fall)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses, and answers with their logits."""
        free = computed_from_targets(scene) | predictions_and_logits(scene)
        return fired[~np.isin(fired, list(free))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how far it is off."""
        return (
            f"The spread of {scene.table.place(slot)} has left what it was at first by a factor of "
            f"{self.streak.worst[slot]:.3g} (step {self.streak.worst_step[slot]})."
        )


def _before(spread: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the smallest spread of the layers that ran before each one, NaN for the first."""
    rank = np.argsort(order, kind="stable")
    smallest = np.fmin.accumulate(spread[:, rank], axis=1)
    found = np.full(spread.shape, np.nan)
    found[:, rank[1:]] = smallest[:, :-1]
    return found


def _embeds(module_class: str) -> bool:
    return "Embedding" in module_class or "Norm" in module_class
