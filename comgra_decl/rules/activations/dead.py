"""Units that are never active."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    NO_SLOTS,
    RECTIFIERS,
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
)


class DeadParameters(Patient):
    """Options of `dead_units`."""

    share: Share = 0.5
    """The largest allowed share of dead units in a layer."""

    zeros: Share = 0.98
    """The largest allowed share of zeros in a rectifier's output."""


class DeadUnits(SlotRule):
    """Units that are never active and so never learn again."""

    name = "dead_units"
    certainty = 0.75
    definition = (
        "For `patience` records in a row, more than `share` of the gradient elements of a module's "
        "bias and of its weight are exactly zero although other gradients are not. Such elements "
        "belong to units that no sample of the batch activates. Or more than `zeros` of a "
        "rectifier's output is zero although its input is not entirely zero."
    )
    source = (
        "SageMaker Debugger (more than half of a layer's units are dead); the book chapter "
        "'Debugging: Visualizing Activation Maps & Gradients' (99% zeros)."
    )
    advice = (
        "Lower the learning rate, initialize by He with biases at 0, normalize before the "
        "activation, or use LeakyReLU or GELU. Check for inputs far from zero mean."
    )
    explained_by = ("nonfinite", "large_update", "loss_diverges", "collapsing_output")
    Parameters = DeadParameters
    of_state = True
    statistics = ("zero_fraction",)
    evidence, of_graph = "share of zeros", True
    needs = "outputs or gradients of biases, {select: '**', capture: [output, parameter_grad]}"

    _sources = NO_SLOTS
    _weights = NO_SLOTS  # the gradient of the weight beside each bias

    def wants(self, table: SlotTable) -> Mask:
        """Returns the outputs of rectifiers and the gradients of biases; notes their inputs."""
        self._sources = single_sources(self.scene)
        rectified = table.outputs & table.where(lambda i: i.module_class in RECTIFIERS)
        biases = table.parameter_gradients & table.where(
            lambda i: i.key.role == "bias" and len(i.shape) == 1 and i.shape[0] > 3
        )
        self._weights = np.full(len(table), -1, np.int64)
        for slot in np.flatnonzero(biases).tolist():
            weight = table.infos[slot].key._replace(role="weight")
            self._weights[slot] = table.by_key.get(weight, -1)
        return rectified | (biases & table.where(lambda i: i.dtype != "float16"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the share of zeros with the limits."""
        zeros = window.read("zero_fraction", at).astype(np.float64)
        bias = window.table.parameter_gradients[at]
        limit = np.where(bias, self.parameters.share, self.parameters.zeros)
        hit = zeros > limit
        source = self._sources[at]
        empty = window.read("zero_fraction", np.maximum(source, 0)) == 1  # the input is to blame
        hit &= bias | (source < 0) | ~empty
        weight = self._weights[at]
        # a bias alone without a gradient cancels out behind its module
        alive = window.read("zero_fraction", np.maximum(weight, 0)) <= self.parameters.share
        # and a layer without any gradient is not trained, which is another rule's finding
        still = (zeros == 1) & (window.read("zero_fraction", np.maximum(weight, 0)) == 1)
        hit &= ~(bias & (weight >= 0) & (alive | still))
        if bias.any():
            nothing = (zeros[:, bias] == 1).all(1)  # nothing is trained: another rule's finding
            hit[np.ix_(nothing, bias)] = False
        return hit, zeros

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Returns rectifiers in the order they ran, then biases, nearest to the loss first."""
        bias = scene.table.parameter_gradients[fired]
        order = scene.table.order[fired] * np.where(bias, -1, 1)
        return fired[np.lexsort((order, bias, self.streak.first[fired]))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message for a slot."""
        info, share = scene.table.infos[slot], self.streak.worst[slot]
        if info.kind == "parameter":
            return f"{share:.0%} of the units of {info.key.node} are dead: never active."
        return f"{share:.1%} of {scene.table.place(slot)} is zero."
