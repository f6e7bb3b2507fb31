"""Trainable parameters that are not trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    MOST_OTHERS,
    Finding,
    Mask,
    Measured,
    Place,
    Previous,
    Scene,
    SlotKey,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_STATES = {
    "none": "never has a gradient",
    "zero": "has a gradient of exactly zero",
    "unknown": "never changes",
}


class Untrained(SlotRule):
    """Trainable parameters that are not trained."""

    name = "untrained_parameter"
    severity = "error"
    certainty = 0.9
    definition = (
        "A parameter with `requires_grad` has no gradient in any record although others have one, "
        "or a gradient of exactly zero for `patience` records in a row. If gradients are not "
        "recorded: the parameter stays exactly the same for `patience` records while others change."
    )
    source = (
        "TheDeepChecker's untrained parameters; the section on unused parameters in the book "
        "chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "Check that the optimizer received it (`optimizer.add_param_group`), that its module is "
        "called, and that nothing cuts it off from the loss: detach(), .data, .item(), "
        "torch.no_grad(), an argmax. If it is frozen on purpose, set requires_grad=False."
    )
    explained_by = ("nonfinite",)
    statistics = ("abs_max",)
    evidence = "size of its gradient"
    needs = "gradients of parameters, {select: '**', capture: [parameter_grad]}"

    _before: dict[str, Previous] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the gradients of parameters; if there are none, the parameters."""
        gradients = table.parameter_gradients
        return gradients if gradients.any() else table.parameters

    def measure(self, window: Window, at: Slots) -> Measured:
        """Finds gradients of exactly zero, or parameters that do not change."""
        if window.table.parameter_gradients[at].all():
            size = window.read("abs_max", at).astype(np.float64)
            still = size == 0
        else:
            still = np.ones((len(window), len(at)), np.bool_)
            for name in ("mean", "l2", "std", "abs_max"):
                if window.has(name):
                    value = window.read(name, at).astype(np.float64)
                    still &= value == self._before.setdefault(name, Previous()).look(at, value)
            size = np.zeros(still.shape)
        return still & ~still.all(1, keepdims=True), size

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding for all parameters that are not trained."""
        parameters = scene.parameters
        missing = [] if scene.records < self.patience else self._without(scene)
        zero = {scene.table.place(int(s)) for s in self.streak.fired if self._is_still(scene, s)}
        zero = {p for p in zero if parameters.get((p.node, p.role), {}).get("trainable", True)}
        places = [Place(node, role) for node, role in parameters]
        found = [p for p in places if p in missing or Place(p.node, p.role, 0, "grad") in zero]
        found += [p for p in sorted(zero, key=str) if p.pass_ == "forward"]
        found += [p for p in sorted(zero, key=str) if (p.node, p.role) not in parameters]
        found = list(dict.fromkeys(found))
        if not found:
            return []
        lead, gradient = self._lead(scene, found, missing)
        return [
            self.finding(
                scene,
                place=lead,
                first_step=0,
                message=f"{lead} is trainable but not trained: it {_STATES[gradient]}.",
                evidence={"records": scene.records, "gradient": gradient},
                also=len(found) - 1,
                others=tuple(place for place in found if place != lead)[:MOST_OTHERS],
            )
        ]

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Whether another finding explains it; a dead rectifier explains a gradient of zero."""
        if finding.evidence["gradient"] == "zero" and other.rule == "dead_units":
            return other.place is not None and other.place.pass_ == "forward"
        return super().follows(finding, other)

    def _lead(
        self, scene: Scene, found: Sequence[Place], missing: Collection[Place]
    ) -> tuple[Place, str]:
        """Returns the parameter to name, and the state of its gradient."""
        never = [place for place in found if place in missing]
        if never:
            return never[0], "none"
        if not scene.table.parameter_gradients.any():
            return found[0], "unknown"
        # gradients come from the loss: the last layer without one is where they end
        return max(found, key=lambda place: self._ran(scene, place)), "zero"

    def _ran(self, scene: Scene, place: Place) -> int:
        """Returns when the parameter's node ran in a step; -1 if unknown."""
        keys = (SlotKey(place.node, place.role, 0, pass_) for pass_ in ("forward", "grad"))
        slots = [scene.table.by_key[key] for key in keys if key in scene.table.by_key]
        return max((int(scene.table.order[slot]) for slot in slots), default=-1)

    def _is_still(self, scene: Scene, slot: int) -> bool:
        """Whether it holds in nearly all records: an expert may wait for its first token."""
        return bool(self.streak.records[slot] + self.patience >= 0.9 * self.streak.seen[slot])

    def _without(self, scene: Scene) -> set[Place]:
        """Returns the trainable parameters without a gradient, if others have one."""
        table = scene.table
        if not table.parameter_gradients.any():
            return set()
        having = {
            (i.key.node, i.key.role) for i in table.infos if i.kind == "parameter" and _back(i.key)
        }
        known = {(i.key.node, i.key.role) for i in table.infos if i.kind == "parameter"}
        captured = any(i.kind == "parameter" and i.key.pass_ == "forward" for i in table.infos)
        return {
            Place(node, role)
            for (node, role), facts in scene.parameters.items()
            if facts.get("trainable")
            and not facts.get("tied_to")
            and (node, role) not in having
            and ((node, role) in known or not captured)
        }

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return f"{scene.table.place(slot)} is not trained."


def _back(key: Any) -> bool:
    return str(key.pass_).startswith("grad")
