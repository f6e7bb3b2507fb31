"""Trainable parameters that are not trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    MOST_OTHERS,
    Finding,
    First,
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
    weights_beside,
)

_STATES = {
    "none": "is trainable but not trained: it never receives a gradient",
    "zero": "is trainable but not trained: its gradient is exactly zero",
    "unknown": "is trainable but not trained: it never changes",
    "unused": "is trainable but never used",
    "unreached": "is trainable but not trained: the output of its module does not affect the loss",
    "not optimized": "has a gradient, but belongs to no optimizer: it keeps its initial value",
}
_ADVICE = {
    "unused": (
        "Use the parameter (check whether its module is called), or remove it. To keep it for "
        "later use, set requires_grad=False."
    ),
    "unreached": (
        "Use the output of the module in the loss, or remove the module. To keep it for later use, "
        "set requires_grad=False."
    ),
    "not optimized": (
        "Create the optimizer after the last change to the model, or add the parameter with "
        "`optimizer.add_param_group`. If it is frozen on purpose, set requires_grad=False, which "
        "also saves the computation of its gradient."
    ),
}
_LOSSES = 10  # number of losses averaged at the start and at the end
_ORDER = ("none", "zero", "unknown", "not optimized", "unreached", "unused")
_HINTS = ("unreached", "unused")


class Untrained(SlotRule):
    """Trainable parameters that are not trained."""

    name = "untrained_parameter"
    severity = "error"
    certainty = 0.9
    definition = (
        "A parameter with `requires_grad` belongs to an optimizer but is not trained, while "
        "other parameters have gradients. Either it has no gradient in any record, or its "
        "gradient is exactly zero for `patience` records in a row. The finding is only a hint if "
        "the parameter is never used, if no output of its module affects the loss, or if its "
        "gradient is zero but the loss has fallen by half. Alternatively, a parameter receives "
        "gradients but never changes, because it belongs to no optimizer although other "
        "parameters do. The finding is then an error if the parameter comes after all trained "
        "parameters, a hint if it comes before all of them or if all such weights began as copies "
        "of trained ones (target networks), and a warning otherwise. If "
        "gradients are not recorded, the rule instead reports parameters that remain unchanged "
        "for `patience` records while others change. Parameters that belong to no optimizer and "
        "have no gradient are ignored (teachers, target networks). A bias is also ignored if its "
        "gradient is zero but that of the weight is not, because such a bias cancels out in a "
        "subsequent normalization or difference."
    )
    source = (
        "TheDeepChecker's check for untrained parameters; the section on unused parameters in the "
        "book chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "Check that the module is called and that nothing cuts it off from the loss: detach(), "
        ".data, .item(), torch.no_grad() or an argmax. If it is frozen on purpose, set "
        "requires_grad=False."
    )
    explained_by = (
        "nonfinite",
        "zero_derivative",
    )
    statistics = ("abs_max",)
    evidence = "magnitude of its gradient"
    needs = "parameter gradients, {select: '**', capture: [parameter_grad]}"

    _before: dict[str, Previous] = per_run(dict)
    _last: dict[str, Previous] = per_run(dict)
    _start = per_run(First)
    _first: list[float] = per_run(list)
    _latest: list[float] = per_run(list)
    _moved: set[int] = per_run(set)  # slots of parameters that have changed
    _kept: set[int] = per_run(set)  # those that were the same in two records

    def look(self, window: Window) -> None:
        """Process the next training records."""
        super().look(window)
        at = np.flatnonzero(window.table.parameters)
        for name in ("mean", "l2", "abs_max"):
            if window.has(name) and len(at):
                value = window.read(name, at).astype(np.float64)
                if name == "l2":
                    self._start.look(at, value)
                before = self._last.setdefault(name, Previous()).look(at, value)
                known = np.isfinite(value) & np.isfinite(before)
                self._moved |= {int(slot) for slot in at[((value != before) & known).any(0)]}
                self._kept |= {int(slot) for slot in at[((value == before) & known).any(0)]}

    def wants(self, table: SlotTable) -> Mask:
        """Return the gradients of parameters; the parameters themselves if none are recorded."""
        gradients = table.parameter_gradients
        return gradients if gradients.any() else table.parameters

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where gradients are exactly zero or parameters do not change."""
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
        """Return one finding for all untrained parameters; its message names the most serious."""
        found = self._found(scene)
        if not found:
            return []
        state = min(found.values(), key=_ORDER.index)
        same = [place for place, its in found.items() if its == state]
        lead = same[0]
        if (
            state == "zero"
        ):  # gradients flow backwards from the loss, so the last layer without one cuts them off
            lead = max(same, key=lambda place: self._ran(scene, place))
        rest = [place for place in found if place != lead]
        return [
            self.finding(
                scene,
                place=lead,
                first_step=0,
                message=f"{lead} {_STATES[state]}.",
                advice=_ADVICE.get(state, self.advice),
                severity=self._severity(scene, lead, found),
                evidence={"records": scene.records, "gradient": state},
                also=len(rest),
                others=tuple(rest)[:MOST_OTHERS],
            )
        ]

    def _found(self, scene: Scene) -> dict[Place, str]:
        """Return all untrained parameters with their states."""
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

    def _severity(self, scene: Scene, lead: Place, found: dict[Place, str]) -> str:
        """Return the severity for untrained parameters."""
        state = found[lead]
        if state in _HINTS or (state == "zero" and self._learns):
            return "hint"
        if state != "not optimized":
            return self.severity
        if self._are_copies(scene, [place for place, its in found.items() if its == state]):
            return "hint"
        here = self._ran(scene, lead)
        trained = [
            self._ran(scene, Place(*key))
            for key, facts in scene.parameters.items()
            if facts.get("optimized")
        ]
        if all(here > other for other in trained):
            return "error"
        return "hint" if all(here < other for other in trained) else "warning"

    def _are_copies(self, scene: Scene, places: list[Place]) -> bool:
        """Return whether the weights among these parameters began with values of trained ones."""
        parameters, by_key = scene.parameters, scene.table.by_key
        sizes: dict[tuple[str, tuple[int, ...]], set[float]] = {}
        for (node, role), facts in parameters.items():
            slot = by_key.get(SlotKey(node, role, 0, "forward"))
            if facts.get("optimized") and slot is not None:
                known = sizes.setdefault((role, tuple(facts["shape"])), set())
                known.add(float(self._start.known(np.array([slot]))[0]))
        found = []
        for place in places:
            shape = tuple(parameters[place.node, place.role]["shape"])
            slot = by_key.get(SlotKey(place.node, place.role, 0, "forward"))
            if len(shape) > 1 and slot is not None:  # biases may all be zero
                size = float(self._start.known(np.array([slot]))[0])
                found.append(size in sizes.get((place.role, shape), set()))
        return bool(found) and all(found)

    @property
    def _learns(self) -> bool:
        """Whether the loss has fallen by half."""
        if len(self._latest) < _LOSSES or len(self._first) < _LOSSES:
            return False
        return float(np.mean(self._latest)) < 0.5 * float(np.mean(self._first))

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Record the first and the latest losses."""
        if numbers.name == "loss":
            values = numbers.values.tolist()
            self._first += values[: max(0, _LOSSES - len(self._first))]
            self._latest[:] = (self._latest + values)[-_LOSSES:]

    def _is_left_out(self, scene: Scene, place: Place) -> bool:
        """Return whether the module of an unchanged parameter receives gradients."""
        slot = scene.table.by_key.get(SlotKey(place.node, place.role, 0, "forward"))
        if slot is None or slot in self._moved or scene.records < self.patience:
            return False
        if (self._moved or self._kept) and slot not in self._kept:  # it lived for one step
            return False
        return any(
            info.key.node == place.node and is_gradient(info.key.pass_)
            for info in scene.table.infos
        )

    def _why_without(self, scene: Scene, place: Place) -> str:
        """Return the state of a parameter that has no gradient."""
        node, key = place.node, SlotKey(place.node, place.role, 0, "forward")
        used = {graph.keys[a] for graph in scene.structures.values() for a, _, _ in graph.edges}
        if not self._is_called(scene, node) or (used and key not in used):
            return "unused"
        inside = f"{node}."
        reaching = {key.node for key in reaching_loss(scene)}
        # outputs of the module and its submodules; parameters reach every module that uses them
        reached = not reaching or any(n == node or n.startswith(inside) for n in reaching)
        return "none" if reached else "unreached"

    def _is_called(self, scene: Scene, node: str) -> bool:
        """Return whether a module or one of its submodules computed anything with gradients."""
        return any(
            info.kind == "computed"
            and info.key.pass_ == "forward"
            and (info.key.node == node or info.key.node.startswith(f"{node}."))
            for info in scene.table.infos
        )

    def _cancels(self, scene: Scene, node: str, role: str) -> bool:
        """Return whether only a module's bias lacks a gradient, because it cancels out later."""
        if role != "bias":
            return False
        table = scene.table
        weights = table.remembered(weights_beside, weights_beside).get(node, [])
        scale = table.by_key.get(SlotKey(node, "weight", 0, "grad"))  # of a normalization
        weights = weights if scale is None else [*weights, scale]
        return any(weight not in self.streak.fired for weight in weights)

    def follows(self, finding: Finding, other: Finding) -> bool:
        """Return whether another finding explains this one; dead units explain zero gradients."""
        if finding.evidence["gradient"] == "zero" and other.rule == "dead_units":
            return other.place is not None and other.place.pass_ == "forward"
        return super().follows(finding, other)

    def _ran(self, scene: Scene, place: Place) -> int:
        """Return the position of a parameter's node in execution order; -1 if unknown."""
        keys = (SlotKey(place.node, place.role, 0, pass_) for pass_ in ("forward", "grad"))
        slots = [scene.table.by_key[key] for key in keys if key in scene.table.by_key]
        return max((int(scene.table.order[slot]) for slot in slots), default=-1)

    def _is_still(self, scene: Scene, slot: int) -> bool:
        """Return whether a state lasts for nearly all records; experts may be used only later."""
        return bool(self.streak.records[slot] + self.patience >= 0.9 * self.streak.seen[slot])

    def _without(self, scene: Scene) -> set[Place]:
        """Return trainable parameters that have no gradient while others have one."""
        table = scene.table
        if not table.parameter_gradients.any():
            return set()
        having = {
            (i.key.node, i.key.role) for i in table.infos if i.kind == "parameter" and _back(i.key)
        }
        known = {(i.key.node, i.key.role) for i in table.infos if i.kind == "parameter"}
        captured = any(i.kind == "parameter" and i.key.pass_ == "forward" for i in table.infos)
        parameters = scene.parameters.items()
        # the gradient of a shared parameter is recorded once, with one of its modules
        shared = {facts.get("tied_to") for key, facts in parameters if key in having}
        return {
            Place(node, role)
            for (node, role), facts in parameters
            if facts.get("trainable")
            and not facts.get("tied_to")
            and (node, role) not in having
            and f"{node}.{role}" not in shared
            and ((node, role) in known or not captured)
        }

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return f"{scene.table.place(slot)} is not trained."


def _back(key: Any) -> bool:
    return str(key.pass_).startswith("grad")
