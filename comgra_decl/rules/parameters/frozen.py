"""Frozen parameters that change."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Bools,
    Count,
    First,
    Mask,
    Measured,
    Patient,
    Previous,
    Scene,
    SlotKey,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_CHANGE = 1e-6  # relative change; float32 rounding errors are smaller


class FrozenParameters(Patient):
    """Options of `frozen_parameter_moves`."""

    patience: Count = 2


class FrozenMoves(SlotRule):
    """Frozen parameters that change."""

    name = "frozen_parameter_moves"
    severity = "error"
    certainty = 0.85
    definition = (
        "A parameter has requires_grad=False and belongs to an optimizer. Nevertheless, for "
        "`patience` records in a row, in which it received no gradient, its l2 norm changes "
        f"by more than {_CHANGE:g} relative to the previous record. Parameters that belong to no "
        "optimizer are ignored, because the program updates them itself (moving averages of "
        "weights, target networks). Weights that began as copies of trained ones are ignored for "
        "the same reason, even in an optimizer, which skips parameters without a gradient."
    )
    source = (
        "The section on frozen layers in the book chapter 'Debugging: Visualizing Activation Maps "
        "& Gradients'. Adam and weight decay change every parameter that has a .grad."
    )
    advice = (
        "Pass only parameters with requires_grad=True to the optimizer, because weight decay and "
        "momentum also change all other parameters. Also look for code that writes to `.data` or "
        "copies weights into the model."
    )
    Parameters = FrozenParameters
    statistics = ("l2",)
    evidence = "relative change"
    needs = "parameters, {select: '**', capture: [parameter]}, some with requires_grad=False"

    _before = per_run(Previous)
    _start = per_run(First)
    _trained = per_run(Previous)  # 1 where a parameter had a gradient

    def wants(self, table: SlotTable) -> Mask:
        """Return the parameters."""
        return table.parameters

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the relative change in the l2 norm since the previous record."""
        norm = window.read("l2", at).astype(np.float64)
        self._start.look(at, norm)
        before = self._before.look(at, norm)
        change = np.abs(norm - before) / np.maximum(np.abs(before), 1e-12)
        trained = self._have_gradients(window, at)
        before_trained = np.nan_to_num(self._trained.look(at, trained.astype(np.float64)))
        return (change > _CHANGE) & ~trained & (before_trained == 0), change

    def _have_gradients(self, window: Window, at: Slots) -> Bools:
        """Return which parameters receive a gradient in each record, [records, slots]."""
        by_key = window.table.by_key
        infos = [window.table.infos[slot] for slot in at.tolist()]
        gradients = np.array([by_key.get(i.key._replace(pass_="grad"), -1) for i in infos])
        return np.asarray(window.present[:, gradients] & (gradients >= 0))

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keep only frozen parameters."""
        parameters, infos = scene.parameters, scene.table.infos
        keys = [(infos[slot].key.node, infos[slot].key.role) for slot in fired.tolist()]
        facts = [parameters.get(key, {}) for key in keys]
        frozen = [f.get("trainable") is False and f.get("optimized", True) for f in facts]
        fired = fired[np.array(frozen, np.bool_)]
        return fired if not len(fired) else fired[~self._are_copies(scene, fired)]

    def _are_copies(self, scene: Scene, at: Slots) -> Mask:
        """Return which parameters began with the values of a parameter that can be trained."""
        infos = scene.table.infos
        held = {
            key: scene.table.by_key.get(SlotKey(*key, 0, "forward")) for key in scene.parameters
        }
        trained = {
            (key[1], infos[slot].shape, self._size(slot))
            for key, slot in held.items()
            if slot is not None and scene.parameters[key].get("trainable")
        }
        return np.array(
            [(infos[s].key.role, infos[s].shape, self._size(s)) in trained for s in at.tolist()]
        )

    def _size(self, slot: int) -> float:
        """Return the l2 norm in the first record."""
        return float(self._start.known(np.array([slot]))[0])

    def marks(self) -> dict[int, int]:
        """Return no slots: most parameters are supposed to change."""
        return {}

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return f"{scene.table.place(slot)} has requires_grad=False but changes."
