"""Optimizers that never step, and copies of a model that are never updated."""

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
    """The options of `never_stepped`."""

    least: Count = 5
    """The number of backward passes needed."""


class NeverStepped(Rule):
    """Backward passes after which no optimizer ever steps."""

    name = "never_stepped"
    severity = "error"
    certainty = 0.9
    definition = (
        "backward() was called at least `least` times, no optimizer stepped, and no step ended in "
        "another way (parameters written by hand, comgra.step())."
    )
    source = "Own definition; a forgotten optimizer.step()."
    advice = (
        "Call optimizer.step() after backward(). If the program updates its parameters in a way "
        "that is not recognized, call comgra.step() where a step ends."
    )
    Parameters = NeverSteppedParameters

    _losses: set[str] = per_run(set)
    _step = -1

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Notes how many losses the first step has, and whether there is another step."""
        if numbers.name == "loss" or numbers.name.startswith("loss["):
            self._losses.add(numbers.name)
            self._step = max(self._step, int(numbers.steps.max(initial=-1)))

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding if all losses belong to one step that did not end."""
        many = len(self._losses)
        if self._step > 0 or scene.records > 1 or scene.optimizers or many < self.parameters.least:
            return []
        return [
            self.finding(
                scene,
                first_step=0,
                message=f"No optimizer steps: backward() was called at least {many} times, and "
                "the parameters stay as they are.",
                evidence={"losses": many},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if self._losses else "no loss is logged; set `kpis: {loss: true}`"


class StaleCopyParameters(RuleParameters):
    """The options of `stale_copy`."""

    patience: Count = 3
    """How many evaluation records must show only the copy."""


class StaleCopy(Rule):
    """A copy that is evaluated instead of the trained model but never updated."""

    name = "stale_copy"
    certainty = 0.75
    definition = (
        "At least `patience` evaluation records exist, and all of them contain a model that no "
        "optimizer holds and whose parameters are exactly the same in every record. The trained "
        "model of the same class is never evaluated. The copy may be an average of weights (EMA, "
        "SWA) or a target network that is never updated."
    )
    source = "Own definition; a forgotten update of an average of weights (EMA) or target network."
    advice = (
        "Update the copy after each optimizer step (`ema.update()`, `lerp_`), or evaluate the "
        "trained model."
    )
    Parameters = StaleCopyParameters

    _seen: dict[str, list[int]] = per_run(dict)  # steps of the evaluations of each model
    _before = per_run(Previous)
    _moved: set[int] = per_run(set)

    def look_at_evaluation(self, window: Window) -> None:
        """Notes which models are evaluated, and whether their parameters have changed."""
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
        """Returns a finding about the first stale copy."""
        models = _models(scene)
        for name, (kind, nodes, optimized) in models.items():
            steps = sorted({step for node in nodes for step in self._seen.get(node, [])})
            slots = {i.id for i in scene.table.infos if i.key.node in nodes}
            often = len(steps) > scene.records / 2  # a teacher that is called in each step
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
                        message=f"{name} is evaluated {len(steps)} times and never changes; "
                        f"{trained[0]}, which is trained, is not evaluated.",
                        evidence={"evaluations": len(steps)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        least = self.parameters.patience
        if scene.evaluations < least:
            return f"it needs {least} evaluation records; the run has {scene.evaluations}"
        return None


def _models(scene: Scene) -> dict[str, tuple[str, set[str], bool]]:
    """Returns the class, the nodes, and whether an optimizer holds parameters, of each model."""
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
