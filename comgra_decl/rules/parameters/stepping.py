"""Optimizers that never step, and copies of models that are never updated."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Finding,
    Numbers,
    Place,
    Previous,
    Rule,
    RuleParameters,
    Scene,
    Window,
    per_run,
)


class NeverSteppedParameters(RuleParameters):
    """Options of `never_stepped`."""

    least: Count = 5
    """Number of backward passes required."""


class NeverStepped(Rule):
    """Backward passes that are never followed by an optimizer step."""

    name = "never_stepped"
    severity = "error"
    certainty = 0.9
    definition = (
        "backward() was called at least `least` times, but optimizer.step() was never called "
        "afterwards. No step ended in any other way either, such as by updating parameters by hand "
        "or by calling comgra.step()."
    )
    source = "Our own definition; the usual cause is a missing call to optimizer.step()."
    advice = (
        "Call optimizer.step() after backward(). If the program updates parameters in a way that "
        "is not detected, call comgra.step() at the end of each step."
    )
    Parameters = NeverSteppedParameters

    _losses: set[str] = per_run(set)
    _step = -1

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Count the losses of the first step and check for a second step."""
        if numbers.name == "loss" or numbers.name.startswith("loss["):
            self._losses.add(numbers.name)
            self._step = max(self._step, int(numbers.steps.max(initial=-1)))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if all losses belong to a single, unfinished step."""
        many = len(self._losses)
        if self._step > 0 or scene.records > 1 or scene.optimizers or many < self.parameters.least:
            return []
        return [
            self.finding(
                scene,
                first_step=0,
                message=f"The optimizer never steps: backward() was called at least {many} times, "
                "but the parameters have not changed.",
                evidence={"losses": many},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if self._losses else "no loss is logged; set `kpis: {loss: true}`"


class StaleCopyParameters(RuleParameters):
    """Options of `stale_copy`."""

    patience: Count = 3
    """Number of evaluation records that must contain only the copy."""


class StaleCopy(Rule):
    """A copy that is evaluated instead of the trained model but is never updated."""

    name = "stale_copy"
    certainty = 0.75
    definition = (
        "At least `patience` evaluation records exist. All of them contain a model that does not "
        "belong to an optimizer and whose parameters are identical in every record. The trained "
        "model of the same class is never evaluated. Such a copy may be a moving average of "
        "weights (EMA, SWA) or a target network."
    )
    source = (
        "Our own definition; usually, the program has no code that updates the moving average "
        "(EMA) or the target network."
    )
    advice = (
        "Update the copy after each optimizer step (`ema.update()`, `lerp_`), or evaluate the "
        "trained model instead."
    )
    Parameters = StaleCopyParameters

    _seen: dict[str, list[int]] = per_run(dict)  # evaluated steps of each model
    _before = per_run(Previous)
    _moved: set[int] = per_run(set)

    def look_at_evaluation(self, window: Window) -> None:
        """Record which models are evaluated and whether their parameters have changed."""
        table = window.table
        at = np.flatnonzero(table.parameters)
        if len(at) and window.has("l2"):
            norm = window.read("l2", at).astype(np.float64)
            changed = np.abs(norm - self._before.look(at, norm)) > 0
            self._moved |= {int(slot) for slot in at[changed.any(0)]}
        present = window.present[:, table.computed]
        nodes = [table.infos[slot].key.node for slot in np.flatnonzero(table.computed)]
        for row, step in enumerate(window.steps.tolist()):
            for node in {nodes[column] for column in np.flatnonzero(present[row])}:
                self._seen.setdefault(node, []).append(step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first outdated copy."""
        models = _models(scene)
        for name, (kind, nodes, optimized) in models.items():
            steps = sorted({step for node in nodes for step in self._seen.get(node, [])})
            slots = {i.id for i in scene.table.infos if i.key.node in nodes}
            often = len(steps) > scene.records / 2  # a teacher is called in every step
            rare = len(steps) < self.parameters.patience
            if optimized or often or rare or slots & self._moved:
                continue
            trained = [m for m, (k, _, its) in models.items() if k == kind and its and m != name]
            shown = {node for m in trained for node in models[m][1] if node in self._seen}
            if trained and not shown:
                return [
                    self.finding(
                        scene,
                        place=Place(name),
                        first_step=steps[0],
                        message=f"{name} is evaluated {len(steps)} times but never changes; "
                        f"{trained[0]}, which is trained, is not evaluated.",
                        evidence={"evaluations": len(steps)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        least = self.parameters.patience
        if scene.evaluations < least:
            return f"it needs {least} evaluation records; the run has {scene.evaluations}"
        return None


def _models(scene: Scene) -> dict[str, tuple[str, set[str], bool]]:
    """Return each model's class and nodes, and whether an optimizer contains its parameters."""
    found: dict[str, tuple[str, set[str], bool]] = {}
    name = ""
    for module in scene.documents.get("modules") or []:
        if not module["path"]:
            name = str(module["node"])
            found[name] = str(module["class"]), set(), False
        if name:
            kind, nodes, optimized = found[name]
            held = any(facts.get("optimized", True) for facts in module["parameters"].values())
            found[name] = kind, nodes | {str(module["node"])}, optimized or held
    return found
