"""Units that are never active."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from comgra_decl.rules.api import (
    NO_SLOTS,
    RECTIFIERS,
    Finding,
    Mask,
    Measured,
    Patient,
    Scene,
    Share,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    single_sources,
    weights_beside,
)

_ALIVE = 0.1  # share of units that suffices for training


class DeadParameters(Patient):
    """Options of `dead_units`."""

    share: Share = 0.5
    """Largest allowed share of dead units in a layer."""

    zeros: Share = 0.98
    """Largest allowed share of zeros in the output of a rectifier."""


class DeadUnits(SlotRule):
    """Units that are never active and therefore can no longer learn."""

    name = "dead_units"
    certainty = 0.75
    definition = (
        "For `patience` records in a row, more than `share` of a module's bias gradient and more "
        "than `share` of its weight gradient are exactly zero, while other gradients are nonzero. "
        "The corresponding units are inactive for all samples in the batch. The rule also reports "
        "a rectifier if more than `zeros` (a share) of its output is zero, even though its input "
        f"is not all zeros. The finding is only a hint if at least {_ALIVE:.0%} of the units in "
        "each such layer are alive, because these units still learn. For example, many units may "
        "be inactive for all samples from the start if there are few inputs or all are positive "
        "(as in coupling layers of flows). The same can happen later in reinforcement learning "
        "critics."
    )
    source = (
        "SageMaker Debugger, which reports layers in which more than half of the units are dead; "
        "the book chapter 'Debugging: Visualizing Activation Maps & Gradients' (99% zeros)."
    )
    advice = (
        "Lower the learning rate, use He initialization with zero biases, normalize before the "
        "activation, or use LeakyReLU or GELU. Check whether the inputs have a mean far from zero."
    )
    explained_by = (
        "nonfinite",
        "large_update",
        "loss_diverges",
        "collapsing_output",
        "uneven_columns",
        "summed_loss",
        "unusual_momentum",
    )
    Parameters = DeadParameters
    hints_explain = False
    of_state = True
    statistics = ("zero_fraction",)
    evidence, of_graph = "share of zeros", True
    needs = "outputs or bias gradients, {select: '**', capture: [output, parameter_grad]}"

    _sources = NO_SLOTS
    _weights = NO_SLOTS  # slot of the weight gradient for each bias gradient

    def wants(self, table: SlotTable) -> Mask:
        """Return rectifier outputs and bias gradients, and find the inputs of the rectifiers."""
        self._sources = single_sources(self.scene)
        rectified = table.outputs & table.where(lambda i: i.module_class in RECTIFIERS)
        biases = table.parameter_gradients & table.where(
            lambda i: i.key.role == "bias" and len(i.shape) == 1 and i.shape[0] > 3
        )
        self._weights = np.full(len(table), -1, np.int64)
        beside = table.remembered(weights_beside, weights_beside)
        for slot in np.flatnonzero(biases).tolist():
            key = table.infos[slot].key
            own = table.by_key.get(key._replace(role="weight"), -1)
            self._weights[slot] = own if own >= 0 else beside.get(key.node, [-1])[0]
        return rectified | (biases & table.where(lambda i: i.dtype != "float16"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the share of zeros exceeds the limit, and the share."""
        zeros = window.read("zero_fraction", at).astype(np.float64)
        bias = window.table.parameter_gradients[at]
        limit = np.where(bias, self.parameters.share, self.parameters.zeros)
        hit = zeros > limit
        source = self._sources[at]
        empty = (
            window.read("zero_fraction", np.maximum(source, 0)) == 1
        )  # an entirely zero input causes the zeros
        hit &= bias | (source < 0) | ~empty
        weight = self._weights[at]
        # if only the bias has no gradient, it cancels out after its module
        alive = window.read("zero_fraction", np.maximum(weight, 0)) <= self.parameters.share
        # a layer that has no gradients is not trained; another rule reports it
        still = (zeros == 1) & (window.read("zero_fraction", np.maximum(weight, 0)) == 1)
        hit &= ~(bias & (weight >= 0) & (alive | still))
        if bias.any():
            nothing = (zeros[:, bias] == 1).all(1)  # nothing is trained; another rule reports it
            hit[np.ix_(nothing, bias)] = False
        return hit, zeros

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if enough units in all layers are alive."""
        found = super().findings(scene)
        if not found or (self.streak.worst[self.streak.lasting] > 1 - _ALIVE).any():
            return found
        return [replace(found[0], severity=self.parameters.severity or "hint")]

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Return rectifiers in execution order, then biases, starting with the last layer."""
        bias = scene.table.parameter_gradients[fired]
        order = scene.table.order[fired] * np.where(bias, -1, 1)
        return fired[np.lexsort((order, bias, self.streak.first[fired]))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        info, share = scene.table.infos[slot], self.streak.worst[slot]
        if info.kind == "parameter":
            return f"{share:.0%} of the units of {info.key.node} are dead: they are never active."
        return f"{share:.1%} of {scene.table.place(slot)} is zero."
