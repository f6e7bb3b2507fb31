"""Activations whose scale is wrong from the start or drifts during training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Early,
    Factor,
    First,
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
    sources_of,
)

_FIRST = 5  # records whose median is the initial value
_SMALL = 0.1  # spread up to which an activation counts as small


class InitialisationParameters(Patient):
    """Options of `poor_initialisation`."""

    patience: Count = 3

    within: Count = 10
    """Number of records to check at the beginning."""

    ratio: Factor = 30.0
    """Largest allowed spread of a layer, as a multiple of the median over all layers."""

    small: Positive = 0.01
    """Smallest allowed median spread over all layers."""


class PoorInitialisation(SlotRule):
    """Layers whose first outputs are much too large or too small."""

    name = "poor_initialisation"
    certainty = 0.65
    definition = (
        "Within the first `within` records, at least one of the following conditions holds in the "
        "first record and for `patience` records in a row. (1) The standard deviation of "
        "the output of a layer with weights is above `ratio` times the median over the model's "
        "layers, or below 1 / `ratio`^2 times that median. (2) The standard deviation is above "
        "`ratio`, and also above a third of `ratio` times the smallest standard deviation among "
        "the preceding layers. (3) The median is below `small`. The finding is only a hint if the "
        "loss has since fallen by half and is still near its minimum."
    )
    source = (
        "SageMaker Debugger, which reports a ratio of more than 10 between the largest and "
        "smallest variance of layers. TheDeepChecker, which reports standard deviations outside "
        "the range from 0.5 to 2. This rule is more tolerant because heads often start small."
    )
    advice = (
        "Use He initialization (ReLU) or Glorot initialization (tanh), scale residual branches by "
        "1 / sqrt(depth), and normalize the inputs."
    )
    explained_by = ("nonfinite", "input_scale")
    Parameters = InitialisationParameters
    statistics, harmless = ("std",), True
    evidence = "times too large"
    needs = "outputs of layers with weights, {select: '**', capture: [output]}"
    of_graph = True

    _excess = per_run(First)

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs of modules whose weights have at least two dimensions.

        Outputs used only by normalization layers are excluded, because their scale has no effect.
        """
        normalized = _normalized(self.scene)
        nodes = {i.key.node for i in table.infos if i.kind == "parameter" and len(i.shape) > 1}
        return table.outputs & table.where(
            lambda i: (
                i.key.node in nodes
                and i.key.role == "output"
                and not _embeds(i.module_class)
                and i.id not in normalized
            )
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compare the layers with one another at each step."""
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
        self._excess.look(at, excess)
        first = self._excess.known(at)  # later ones may be due to training
        return (excess > 1) & (first > 1) & early[:, None], np.tile(first * limit, (len(window), 1))

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} starts {self.streak.worst[slot]:.3g} times too large or "
            "too small for its model."
        )


class DriftParameters(Patient):
    """Options of `activation_drift`."""

    patience: Count = 3

    growth: Factor = 100.0
    """Largest allowed spread, as a multiple of its initial value."""

    fall: Factor = 1000.0
    """Factor by which the spread may fall below its initial value."""


class ActivationDrift(SlotRule):
    """Activations that keep growing or shrinking during training."""

    name = "activation_drift"
    certainty = 0.5
    definition = (
        "For `patience` records in a row, the standard deviation of a tensor is above `growth` "
        "times its initial value, or below 1 / `fall` times that value. The initial value is the "
        f"median over the first {_FIRST} records. The standard deviation is computed over the "
        "elements, or across the batch if that is larger. Tensors that start below the median over "
        "all outputs may grow to `growth` times that median, because some branches start at zero. "
        f"Tensors that start below {_SMALL:g} may grow to `growth` times {_SMALL:g}, because the "
        "usual scale of activations is 1. Predictions, their logits, losses, and tensors that only "
        "normalization layers use are ignored. The finding is only a hint if the loss has fallen "
        "by half and is still near its minimum."
    )
    source = (
        "comgra's README, which announces a check for variances that grow without bound; "
        "TheDeepChecker's growth rates."
    )
    advice = (
        "Add normalization (LayerNorm, RMSNorm) or weight decay, or lower the learning rate. If a "
        "tensor shrinks, check for strong regularization or a closed gate."
    )
    explained_by = ("nonfinite", "growing_weight", "large_update", "loss_diverges", "dead_units")
    explained_by_earlier = ("shrinking_weight",)
    Parameters = DriftParameters
    of_state, harmless = True, True
    statistics = ("std",)
    evidence = "times its initial size"
    needs = "outputs, {select: '**', capture: [output]}"

    _early = per_run(Early, _FIRST)

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs."""
        return table.outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the spread divided by its initial value."""
        spread = window.read("std", at).astype(np.float64)
        if window.has("mean"):
            spread = np.fmax(spread, window.read("mean", at, "std"))
        spread = np.where(np.isfinite(spread) & (spread > 0), spread, np.nan)
        early = np.where(np.isnan(spread), np.nan, self._early.look(at, spread))
        usual = np.fmax(_SMALL, row_quantile(early, 0.5))
        growth = spread / np.fmax(early, usual)
        fall = early / spread
        hit = (growth > self.parameters.growth) | (fall > self.parameters.fall)
        return hit, np.fmax(growth, fall)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out predictions, their logits, losses, and tensors that are normalized later."""
        free = computed_from_targets(scene) | predictions_and_logits(scene) | _normalized(scene)
        return fired[~np.isin(fired, list(free))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"The spread of {scene.table.place(slot)} differs from its initial value by a factor "
            f"of {self.streak.worst[slot]:.3g} at step {self.streak.worst_step[slot]}."
        )


def _before(spread: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return, for each layer, the smallest spread of all preceding layers; NaN for the first."""
    rank = np.argsort(order, kind="stable")
    smallest = np.fmin.accumulate(spread[:, rank], axis=1)
    found = np.full(spread.shape, np.nan)
    found[:, rank[1:]] = smallest[:, :-1]
    return found


def _embeds(module_class: str) -> bool:
    return "Embedding" in module_class or "Norm" in module_class


def _normalized(scene: Scene) -> set[int]:
    """Return the slots that enter only normalization layers, according to the graphs so far.

    Between the two, there may be modules that only pass on or reshape one tensor, such as the patch
    embedding that contains the layer.
    """
    infos, sources = scene.table.infos, sources_of(scene)
    weighted = {node for node, _ in scene.parameters}
    sinks: dict[int, set[int]] = {}
    for sink, its in sources.items():
        for source in its:
            sinks.setdefault(source, set()).add(sink)
    found: set[int] = set()
    grew = True
    while grew:
        passed = {s for s in found if infos[s].key.node not in weighted and _single(sources, s)}
        more = {
            source
            for source, its in sinks.items()
            if all("Norm" in infos[s].module_class or s in passed for s in its)
        }
        grew, found = bool(more - found), found | more
    return found


def _single(sources: dict[int, list[int]], slot: int) -> bool:
    return len(set(sources.get(slot, ()))) == 1
