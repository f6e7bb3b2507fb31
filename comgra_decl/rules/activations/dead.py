"""Units that are never active."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
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
    """What can be said of `dead_units`."""

    share: Share = 0.5
    """So many of a layer's units are dead."""

    zeros: Share = 0.98
    """So much of a rectifier's output is zero."""


class DeadUnits(SlotRule):
    """Units that are never active, so that they never learn again."""

    name = "dead_units"
    certainty = 0.75
    definition = (
        "For `patience` records, more than `share` of the gradient of a bias is exactly zero "
        "though not all gradients are (such a bias belongs to a unit that no sample "
        "of the batch has activated), or more than `zeros` of a rectifier's output is zero though "
        "not all of what enters it is."
    )
    source = (
        "SageMaker Debugger (more than half of a layer's units dead), the debugging chapter "
        "(99 % zeros)."
    )
    advice = (
        "Lower the learning rate, initialise by He with biases at 0, normalise before the "
        "activation, or use LeakyReLU or GELU; look at inputs that are far from zero mean."
    )
    explained_by = ("nonfinite", "large_update")
    Parameters = DeadParameters
    statistics = ("zero_fraction",)
    evidence, of_graph = "share of zeros", True
    needs = "outputs or gradients of biases, {select: '**', capture: [output, parameter_grad]}"

    _sources: Slots = np.zeros(0, np.int64)

    def wants(self, table: SlotTable) -> Mask:
        """Returns rectifiers' outputs and the gradients of biases; learns what enters those."""
        self._sources = single_sources(self.scene)
        rectified = table.outputs & table.where(lambda i: i.module_class in RECTIFIERS)
        biases = table.parameter_gradients & table.where(
            lambda i: i.key.role == "bias" and len(i.shape) == 1 and i.shape[0] > 3
        )
        return rectified | (biases & table.where(lambda i: i.dtype != "float16"))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks at the share of zeros."""
        zeros = window.read("zero_fraction", at).astype(np.float64)
        bias = window.table.parameter_gradients[at]
        limit = np.where(bias, self.parameters.share, self.parameters.zeros)
        hit = zeros > limit
        source = self._sources[at]
        empty = window.read("zero_fraction", np.maximum(source, 0)) == 1  # what enters is to blame
        hit &= bias | (source < 0) | ~empty
        if bias.any():
            nothing = (zeros[:, bias] == 1).all(1)  # nothing is trained at all: not this rule's
            hit[np.ix_(nothing, bias)] = False
        return hit, zeros

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Returns rectifiers first, as they ran; then biases, the one nearest to the loss first."""
        bias = scene.table.parameter_gradients[fired]
        order = scene.table.order[fired] * np.where(bias, -1, 1)
        return fired[np.lexsort((order, bias, self.streak.first[fired]))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how many are dead."""
        info, share = scene.table.infos[slot], self.streak.worst[slot]
        if info.kind == "parameter":
            return f"{share:.0%} of the units of {info.key.node} are dead: nothing activates them."
        return f"{share:.1%} of what {scene.table.place(slot)} returns is zero."
