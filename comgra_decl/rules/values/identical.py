"""Units that all compute the same values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Bools,
    Count,
    Finding,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    grown,
)

_FEWEST = 4  # a few units may agree by chance


class IdenticalParameters(Patient):
    """Options of `identical_units`."""

    patience: Count = 3

    spread: Fraction = 1e-5
    """Units are considered equal if they differ by less than this share of their mean magnitude."""


class IdenticalUnits(SlotRule):
    """Units that all compute the same values and receive the same updates."""

    name = "identical_units"
    severity = "error"
    certainty = 0.8
    definition = (
        "All elements of a weight with at least two dimensions are identical and nonzero at the "
        "start, its units receive the same inputs (they are not those of a depthwise convolution), "
        "and its module has no random weight of the same shape, as a deviation has a mean. "
        "Only a hint if the parameter is not called a weight, since transitions may begin equal. "
        "Alternatively, for `patience` records in a row, the units of a layer differ by less "
        "than `spread` times their mean magnitude. The rule compares the outputs of layers with "
        "weights (one value per unit) and the gradients of their biases."
    )
    source = (
        "Goodfellow et al., Deep Learning (2016), section 8.4: initial parameters must break the "
        "symmetry between units."
    )
    advice = "Initialize weights randomly (He, Glorot); use constants only for biases and gains."
    explained_by = ("nonfinite", "input_independence")
    Parameters = IdenticalParameters
    statistics = ("std", "abs_mean")
    lowest, evidence = True, "spread between units"
    needs = "outputs or parameters, {select: '**', capture: [output, parameter]}"

    _constant = np.zeros(
        0, np.int64
    )  # 1: constant at the start, 0: not constant, -1: not recorded yet

    def wants(self, table: SlotTable) -> Mask:
        """Return weights, gradients of biases, and outputs with one value per unit."""
        weights = table.parameters & table.where(lambda i: sum(n > 1 for n in i.shape) > 1)
        biases = table.parameter_gradients & table.where(
            lambda i: i.key.role == "bias" and len(i.shape) == 1 and i.shape[0] >= _FEWEST
        )
        nodes = {i.key.node for i in table.infos if i.kind == "parameter" and len(i.shape) > 1}
        outputs = table.outputs & table.where(
            lambda i: i.key.node in nodes and i.key.role == "output" and len(i.shape) == 2
        )
        return weights | biases | outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the spread between units relative to their magnitude."""
        size = window.read("abs_mean", at).astype(np.float64)
        spread = window.read("std", at).astype(np.float64)
        share = np.where(size > 0, spread / size, np.nan)
        same = (share < self.parameters.spread) & (window.elements(at) >= _FEWEST)
        weight = window.table.parameters[at]
        if weight.any():
            same[:, weight] = self._began(at[weight], share[:, weight], same[:, weight])
        return same, share

    def _began(self, at: Slots, share: NDArray[np.float64], same: Bools) -> Bools:
        """Return the result of each weight's first record, repeated for all records."""
        self._constant = grown(self._constant, int(at.max()) + 1, -1)
        seen = ~np.isnan(share)
        first = same[seen.argmax(0), np.arange(len(at))]
        new = (self._constant[at] < 0) & seen.any(0)
        self._constant[at[new]] = first[new]
        return np.broadcast_to(self._constant[at] == 1, same.shape)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out constant weights whose module has a random one of the same shape.

        They are scales or deviations of the random weights, whose units differ. Units of depthwise
        convolutions receive different inputs.
        """
        infos = scene.table.infos
        known = range(min(len(self._constant), len(infos)))
        random = {(infos[i].key.node, infos[i].shape) for i in known if self._constant[i] == 0}
        depthwise = {
            str(module["node"])
            for module in scene.documents.get("modules") or []
            if (module.get("settings") or {}).get("groups", 1) > 1
        }
        left_out = [
            infos[at].kind == "parameter"
            and (
                (infos[at].key.node, infos[at].shape) in random
                or infos[at].key.node in depthwise
                or _is_filter(infos[at])
            )
            for at in fired.tolist()
        ]
        return fired[~np.array(left_out, np.bool_)]

    def ordered(self, scene: Scene, fired: Slots) -> Slots:
        """Return the slots in order of importance: weights and outputs before other parameters."""
        order = super().ordered(scene, fired)
        other = [_may_begin_equal(scene.table.infos[at]) for at in order.tolist()]
        return order[np.argsort(other, kind="stable")]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding, which is a hint if it concerns only parameters that are no weights."""
        found = super().findings(scene)
        if not found or self.parameters.severity is not None:
            return found
        fired = self.chosen(scene, self.streak.fired)
        if all(_may_begin_equal(scene.table.infos[at]) for at in fired.tolist()):
            return [replace(found[0], severity="hint")]
        return found

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        info = scene.table.infos[slot]
        if info.kind == "parameter" and info.key.pass_ == "forward":
            return f"{scene.table.place(slot)} starts with all elements identical."
        return (
            f"All units of {info.key.node} compute the same values: {scene.table.place(slot)} "
            f"differs between them by {self.streak.worst[slot]:.1e} of its magnitude."
        )


def _may_begin_equal(info: SlotInfo) -> bool:
    """Whether a parameter may hold something else than the weights of units."""
    role = info.key.role.lower()
    is_weight = "weight" in role or "kernel" in role or role.startswith("w")
    return info.kind == "parameter" and info.key.pass_ == "forward" and not is_weight


def _is_filter(info: SlotInfo) -> bool:
    """Whether a weight that is no layer's may hold one filter per channel, [channels, 1, ...]."""
    return len(info.shape) > 2 and info.shape[1] == 1 and "Conv" not in info.module_class
