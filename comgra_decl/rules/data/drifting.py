"""Inputs whose spread keeps changing although the task stays the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    BINARY_LOGITS,
    CLASSIFICATION,
    ELEMENTWISE,
    PROBABILITIES,
    Count,
    Factor,
    Finding,
    Rule,
    RuleParameters,
    Scene,
    Window,
    input_slots,
    per_run,
    target_of,
)

_SUPERVISED = (
    CLASSIFICATION | BINARY_LOGITS | PROBABILITIES | (ELEMENTWISE & {"mse_loss", "l1_loss"})
)
_PARTS = 8  # into which the course is divided
_STEADY = 0.9  # the rank correlation of the parts with their order


class DriftParameters(RuleParameters):
    """Options of `input_drift`."""

    factor: Factor = 1.3
    """Smallest factor by which the spread of the inputs must change."""

    least: Count = 24
    """Number of records required."""


class InputDrift(Rule):
    """Inputs whose spread keeps growing or shrinking during training."""

    name = "input_drift"
    certainty = 0.65
    definition = (
        f"The run is divided into {_PARTS} parts of equal length, and the standard deviation of a "
        "floating-point input is averaged over each part. Over at least `least` records, these "
        f"averages rise or fall steadily (rank correlation above {_STEADY}), and by a factor of "
        "more than `factor` from the first part to the last. The only loss compares predictions "
        "with targets, and the spread of these targets changes by less than a quarter as much."
    )
    source = (
        "Our own definition. For example, a program may add noise to views of its data, which "
        "changes the data in place."
    )
    advice = (
        "Check for in-place operations on the data set or on views of it (`x += noise`, `x[i:j]` "
        "of an array). Use `x = x + noise`, or copy first."
    )
    explained_by = ("nonfinite",)
    Parameters = DriftParameters

    _spread: dict[int, list[tuple[int, float]]] = per_run(dict)

    def look(self, window: Window) -> None:
        """Store the spread of inputs and targets."""
        if not window.has("std", "mean"):
            return
        infos = window.table.infos
        at = [int(s) for s in input_slots(window.table) if "float" in infos[s].dtype]
        at += [i.id for i in infos if i.kind == "target" and i.key.pass_ == "forward"]
        for slot in at:
            if infos[slot].batch_dim is None:
                continue
            one = np.array([slot])
            spread = np.hypot(window.read("std", one), window.read("mean", one, "std"))[:, 0]
            known = self._spread.setdefault(slot, [])
            for step, value in zip(window.steps.tolist(), spread.tolist(), strict=True):
                if np.isfinite(value):
                    known.append((step, float(value)))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first input that drifts."""
        if not scene.calls or any(c.function not in _SUPERVISED for c in scene.calls):
            return []
        if scene.bootstraps:  # the states that a policy visits change with the policy
            return []
        goals = {target_of(scene, call) for call in scene.calls}
        for slot, known in self._spread.items():
            if scene.table.infos[slot].kind != "input" or len(known) < self.parameters.least:
                continue
            parts = _parts(known)
            change = parts[-1] / parts[0] if parts[0] > 0 else 1.0
            if len(parts) < _PARTS - 2:
                continue
            order = _order(parts)
            up, down = order > _STEADY, order < -_STEADY
            far = max(change, 1 / change) if change > 0 else 1.0
            if not (up or down) or far < self.parameters.factor:
                continue
            others = [_change(self._spread.get(g or -1, [])) for g in goals if g is not None]
            if any(other > 1 + (far - 1) / 4 for other in others):
                continue
            place = scene.table.place(slot)
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=known[0][0],
                    message=f"{place} {'grows' if up else 'shrinks'} throughout training: its "
                    f"standard deviation changes from {parts[0]:.3g} to {parts[-1]:.3g}, while the "
                    "targets do not change.",
                    evidence={"first": parts[0], "last": parts[-1]},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not self._spread:
            return "no floating-point input is recorded"
        most, least = max(len(known) for known in self._spread.values()), self.parameters.least
        return None if most >= least else f"it needs {least} records; the run has {most}"


def _parts(known: list[tuple[int, float]]) -> list[float]:
    table: NDArray[np.float64] = np.array(known, np.float64)
    steps, values = table[:, 0], table[:, 1]
    edges = np.linspace(steps[0], steps[-1] + 1, _PARTS + 1)
    parts = [values[(steps >= a) & (steps < b)] for a, b in pairwise(edges)]
    return [float(part.mean()) for part in parts if len(part)]


def _order(parts: list[float]) -> float:
    """Return Spearman's rank correlation of the parts with their order."""
    ranks = np.argsort(np.argsort(parts))
    return float(np.corrcoef(np.arange(len(parts)), ranks)[0, 1])


def _change(known: list[tuple[int, float]]) -> float:
    if len(known) < _PARTS:
        return 1.0
    parts = _parts(known)
    low, high = min(parts[0], parts[-1]), max(parts[0], parts[-1])
    return high / low if low > 0 else 1.0
