"""Trainable parameters that are not trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    MOST_OTHERS,
    Finding,
    Mask,
    Measured,
    Numbers,
    Place,
    Previous,
    Scene,
    SlotKey,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    is_gradient,
    per_run,
    reaching_loss,
)

_STATES = {
    "none": "is trainable but not trained: it never has a gradient",
    "zero": "is trainable but not trained: its gradient is exactly zero",
    "unknown": "is trainable but not trained: it never changes",
    "unused": "is trainable but never used",
    "unreached": "is trainable but not trained: what its module returns does not reach the loss",
    "not optimized": "has a gradient, but no optimizer holds it: it stays as it was initialized",
}
_ADVICE = {
    "unused": (
        "Use it (is its module called?), or remove it. A parameter that is kept for later can be "
        "left out with requires_grad=False."
    ),
    "unreached": (
        "Add what the module returns to the loss, or remove it. If it is kept for later, set "
        "requires_grad=False."
    ),
    "not optimized": (
        "Create the optimizer after the last change to the model, or add the parameter with "
        "`optimizer.add_param_group`. If it is frozen on purpose, set requires_grad=False, which "
        "also saves its gradient."
    ),
}
_LOSSES = 10  # whose mean is the start, or the end
_ORDER = ("none", "zero", "unknown", "not optimized", "unreached", "unused")
_HINTS = ("unreached", "unused")


class Untrained(SlotRule):
    """Trainable parameters that are not trained."""

    name = "untrained_parameter"
    severity = "error"
    certainty = 0.9
    definition = (
        "Other parameters have gradients, but a parameter with `requires_grad` that an optimizer "
        "holds has no gradient in any record, or a gradient of exactly zero for `patience` records "
        "in a row. This is only a hint if the parameter is never used, if no output of its module "
        "reaches the loss, or if its gradient is zero but the loss has fallen by half. Or a "
        "parameter receives gradients but never changes, because no optimizer holds it although "
        "optimizers hold others. This is an error if the parameter comes after all trained ones, a "
        "hint if it comes before all of them, and otherwise a warning. If gradients are not "
        "recorded, the rule instead finds parameters that stay exactly the same for `patience` "
        "records while others change. It ignores parameters that receive no gradient and that no "
        "optimizer holds (teachers, target networks). It also ignores biases whose gradient is "
        "zero although their weight's is not, because these cancel out in a later normalization or "
        "difference."
    )
    source = (
        "TheDeepChecker's untrained parameters; the section on unused parameters in the book "
        "chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "Check that its module is called and that nothing cuts it off from the loss: detach(), "
        ".data, .item(), torch.no_grad(), an argmax. If it is frozen on purpose, set "
        "requires_grad=False."
    )
    explained_by = ("nonfinite",)
    statistics = ("abs_max",)
    evidence = "size of its gradient"
    needs = "gradients of parameters, {select: '**', capture: [parameter_grad]}"

    _before: dict[str, Previous] = per_run(dict)
    _last: dict[str, Previous] = per_run(dict)
    _first: list[float] = per_run(list)
    _latest: list[float] = per_run(list)
    _moved: set[int] = per_run(set)  # slots of parameters that have changed

    def look(self, window: Window) -> None:
        """Adds the next training records."""
        super().look(window)
        at = np.flatnonzero(window.table.parameters)
        for name in ("mean", "l2", "abs_max"):
            if window.has(name) and len(at):
                value = window.read(name, at).astype(np.float64)
                before = self._last.setdefault(name, Previous()).look(at, value)
                changed = (value != before) & np.isfinite(value) & np.isfinite(before)
                self._moved |= {int(slot) for slot in at[changed.any(0)]}

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
        """Returns one finding for all parameters that are not trained, about the worst of them."""
        found = self._found(scene)
        if not found:
            return []
        state = min(found.values(), key=_ORDER.index)
        same = [place for place, its in found.items() if its == state]
        lead = same[0]
        if state == "zero":  # gradients come from the loss: they end at the last layer without one
            lead = max(same, key=lambda place: self._ran(scene, place))
        rest = [place for place in found if place != lead]
        return [
            self.finding(
                scene,
                place=lead,
                first_step=0,
                message=f"{lead} {_STATES[state]}.",
                advice=_ADVICE.get(state, self.advice),
                severity=self._severity(scene, lead, state),
                evidence={"records": scene.records, "gradient": state},
                also=len(rest),
                others=tuple(rest)[:MOST_OTHERS],
            )
        ]

    def _found(self, scene: Scene) -> dict[Place, str]:
        """Returns all parameters that are not trained, and why each is not."""
        zero = {scene.table.place(int(s)) for s in self.streak.fired if self._is_still(scene, s)}
        parameters = scene.parameters
        without = set() if scene.records < self.patience else self._without(scene)
        held = bool(scene.optimizers) or any(f.get("optimized") for f in parameters.values())
        found: dict[Place, str] = {}
        for (node, role), facts in parameters.items():
            place = Place(node, role)
            if not facts.get("trainable") or facts.get("tied_to"):
                continue
            if held and not facts.get("optimized", True):
                if self._is_left_out(scene, place):
                    found[place] = "not optimized"
            elif place in without:
                found[place] = self._why_without(scene, place)
            elif Place(node, role, 0, "grad") in zero and not self._cancels(scene, node, role):
                found[place] = "zero"
        known = {Place(*key) for key in parameters}
        for place in sorted(zero, key=str):
            if place.pass_ == "forward" and place not in found:
                found[place] = "unknown"
            elif place.pass_ != "forward" and Place(place.node, place.role) not in known:
                found[place] = "zero"
        return found

    def _severity(self, scene: Scene, lead: Place, state: str) -> str:
        """Returns how serious it is that a parameter is not trained."""
        if state in _HINTS or (state == "zero" and self._learns):
            return "hint"
        if state != "not optimized":
            return self.severity
        here = self._ran(scene, lead)
        trained = [
            self._ran(scene, Place(*key))
            for key, facts in scene.parameters.items()
            if facts.get("optimized")
        ]
        if all(here > other for other in trained):
            return "error"
        return "hint" if all(here < other for other in trained) else "warning"

    @property
    def _learns(self) -> bool:
        """Whether the loss has fallen by half."""
        if len(self._latest) < _LOSSES or len(self._first) < _LOSSES:
            return False
        return float(np.mean(self._latest)) < 0.5 * float(np.mean(self._first))

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Notes the first and the newest losses."""
        if numbers.name == "loss":
            values = numbers.values.tolist()
            self._first += values[: max(0, _LOSSES - len(self._first))]
            self._latest[:] = (self._latest + values)[-_LOSSES:]

    def _is_left_out(self, scene: Scene, place: Place) -> bool:
        """Whether gradients come back to the module of a parameter, and nothing changes it."""
        slot = scene.table.by_key.get(SlotKey(place.node, place.role, 0, "forward"))
        if slot is None or slot in self._moved or scene.records < self.patience:
            return False
        return any(
            info.key.node == place.node and is_gradient(info.key.pass_)
            for info in scene.table.infos
        )

    def _why_without(self, scene: Scene, place: Place) -> str:
        """Returns why a parameter has no gradient."""
        node, key = place.node, SlotKey(place.node, place.role, 0, "forward")
        used = {graph.keys[a] for graph in scene.structures.values() for a, _, _ in graph.edges}
        if not self._is_called(scene, node) or (used and key not in used):
            return "unused"
        inside = f"{node}."
        reaching = {key.node for key in reaching_loss(scene)}
        # the outputs of the module, or of one within it; parameters reach whatever uses them
        reached = not reaching or any(n == node or n.startswith(inside) for n in reaching)
        return "none" if reached else "unreached"

    def _is_called(self, scene: Scene, node: str) -> bool:
        """Whether a module, or one within it, has computed anything with gradient."""
        return any(
            info.kind == "computed"
            and info.key.pass_ == "forward"
            and (info.key.node == node or info.key.node.startswith(f"{node}."))
            for info in scene.table.infos
        )

    def _cancels(self, scene: Scene, node: str, role: str) -> bool:
        """Whether only the bias of a module has no gradient: it cancels out behind the module."""
        if role != "bias":
            return False
        weight = scene.table.by_key.get(SlotKey(node, "weight", 0, "grad"))
        return weight is not None and weight not in self.streak.fired

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Whether another finding explains it; a dead rectifier explains a gradient of zero."""
        if finding.evidence["gradient"] == "zero" and other.rule == "dead_units":
            return other.place is not None and other.place.pass_ == "forward"
        return super().follows(finding, other)

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
