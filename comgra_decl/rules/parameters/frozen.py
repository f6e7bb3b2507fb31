"""Frozen parameters that change."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Mask,
    Measured,
    Patient,
    Previous,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_CHANGE = 1e-6  # relative; float32 rounds to less


class FrozenParameters(Patient):
    """The options of `frozen_parameter_moves`."""

    patience: Count = 2


class FrozenMoves(SlotRule):
    """Frozen parameters that change."""

    name = "frozen_parameter_moves"
    severity = "error"
    certainty = 0.85
    definition = (
        "A parameter has requires_grad=False, is held by an optimizer and received no gradient in "
        f"the last record, but its l2 norm changes by more than {_CHANGE:g} of itself between "
        "records, `patience` times in a row. Parameters that no optimizer holds are ignored, "
        "because the program updates them itself (averages of weights, target networks)."
    )
    source = (
        "The section on frozen layers in the book chapter 'Debugging: Visualizing Activation Maps "
        "& Gradients'; Adam and weight decay move any parameter that has a .grad."
    )
    advice = (
        "Give the optimizer only parameters with requires_grad=True (weight decay and momentum "
        "move others, too), and look for code that writes to `.data` or copies weights in."
    )
    Parameters = FrozenParameters
    statistics = ("l2",)
    evidence = "relative change"
    needs = "parameters, {select: '**', capture: [parameter]}, some with requires_grad=False"

    _before = per_run(Previous)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the parameters."""
        return table.parameters

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the l2 norm with the previous one."""
        norm = window.read("l2", at).astype(np.float64)
        before = self._before.look(at, norm)
        change = np.abs(norm - before) / np.maximum(np.abs(before), 1e-12)
        return change > _CHANGE, change

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps the parameters that cannot be trained."""
        parameters = scene.parameters
        keys = [scene.table.infos[slot].key for slot in fired.tolist()]
        facts = [parameters.get((key.node, key.role), {}) for key in keys]
        frozen = [f.get("trainable") is False and f.get("optimized", True) for f in facts]
        return fired[np.array(frozen, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: most parameters that move are meant to."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return f"{scene.table.place(slot)} has requires_grad=False but changes."
