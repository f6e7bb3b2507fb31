"""Parameters that should stay as they are and move."""

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


class FrozenParameters(Patient):
    """What can be said of `frozen_parameter_moves`."""

    patience: Count = 2
    """For so many records in a row it must be so."""


class FrozenMoves(SlotRule):
    """Parameters that should stay as they are and move."""

    name = "frozen_parameter_moves"
    severity = "error"
    certainty = 0.85
    definition = (
        "A parameter with requires_grad=False, in the last record, to which that gave no gradient, "
        "changes its l2 norm by more than a millionth from record to record, `patience` times in a "
        "row."
    )
    source = "The debugging chapter on frozen layers; Adam and weight decay move what has a .grad."
    advice = (
        "Give the optimizer only parameters with requires_grad (weight decay and momentum move "
        "others, too), and look for code that writes to `.data` or copies weights in."
    )
    Parameters = FrozenParameters
    statistics = ("l2",)
    evidence = "relative change"
    needs = "parameters, {select: '**', capture: [parameter]}, some with requires_grad=False"

    _before = per_run(Previous)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the parameters themselves."""
        return table.parameters

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the l2 norm with the one before."""
        norm = window.read("l2", at).astype(np.float64)
        before = self._before.look(at, norm)
        change = np.abs(norm - before) / np.maximum(np.abs(before), 1e-12)
        return change > 1e-6, change

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps those that cannot be trained."""
        parameters = scene.parameters
        keys = [scene.table.infos[slot].key for slot in fired.tolist()]
        frozen = [parameters.get((k.node, k.role), {}).get("trainable") is False for k in keys]
        return fired[np.array(frozen, np.bool_)]

    def marks(self) -> dict[int, int]:
        """Returns nothing: most that move may do so."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says that it moves."""
        return f"{scene.table.place(slot)} has requires_grad=False and changes all the same."
