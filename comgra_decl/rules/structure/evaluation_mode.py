"""Training in evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.rules.api import (
    MODES,
    MOST_OTHERS,
    TRAINING_WITHOUT_GRADIENT,
    Count,
    Finding,
    Patient,
    Place,
    Rule,
    Scene,
    Window,
    per_run,
)

_CLASSES = ("Dropout", "BatchNorm", "InstanceNorm", "StochasticDepth", "DropPath")
"""Substrings in the names of classes that behave differently in evaluation mode."""

_FROM_START = (
    "Call model.train() before training, because a model may be in evaluation mode when it is "
    "loaded. If this is intended, disable this rule."
)


class EvaluationModeParameters(Patient):
    """Options of `training_in_evaluation_mode`."""

    patience: Count = 5


@dataclass
class _Model:
    """State of a model that is called with gradients."""

    trained: bool = False  # whether it was in training mode earlier
    since: int = -1  # first step of the current records in evaluation mode; -1 in training mode
    records: int = 0


class TrainingInEvaluationMode(Rule):
    """Training in evaluation mode."""

    name = "training_in_evaluation_mode"
    severity = "error"
    certainty = 0.85
    definition = (
        "For at least the last `patience` records of the run, all calls to a model with "
        "gradients are in evaluation mode. An optimizer contains most of the model's parameters, "
        "and the model contains modules that behave differently in evaluation mode (BatchNorm, "
        "Dropout). The finding is an error if the model was in training mode before, and a "
        "warning otherwise. Single modules in evaluation mode (a frozen BatchNorm) are ignored."
    )
    source = "Our own definition; the usual cause is a missing call to model.train()."
    advice = "Call model.train() after every evaluation, before the next training step."
    Parameters = EvaluationModeParameters

    _models: dict[str, _Model] = per_run(dict)

    def look(self, window: Window) -> None:
        """Process the modes of the next training records."""
        for step, facts in zip(window.steps.tolist(), window.facts, strict=False):
            for node, training in (facts.get(MODES) or {}).items():
                model = self._models.setdefault(str(node), _Model())
                if training:
                    model.trained, model.since, model.records = True, -1, 0
                else:
                    model.since = step if model.since < 0 else model.since
                    model.records += 1

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first model that is trained in evaluation mode."""
        for node, model in self._models.items():
            different = _different(scene, node)
            if model.records < self.parameters.patience or not different:
                continue
            since = f"From step {model.since} on" if model.trained else "From the start"
            return [
                self.finding(
                    scene,
                    place=Place(different[0]),
                    first_step=model.since,
                    message=f"{since}, {node} is trained in evaluation mode: modules such as "
                    f"{different[0]} behave as in evaluation.",
                    advice=self.advice if model.trained else _FROM_START,
                    severity=self.severity if model.trained else "warning",
                    evidence={"records": model.records},
                    also=len(different) - 1,
                    others=tuple(Place(name) for name in different[1 : MOST_OTHERS + 1]),
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not self._models:
            return "no record contains the mode of a model"
        if scene.records < self.parameters.patience:
            return (
                f"it needs {self.parameters.patience} training records; the run has {scene.records}"
            )
        if not any(_different(scene, node) for node in self._models):
            return "no trained model has a BatchNorm or Dropout module"
        return None


def _different(scene: Scene, root: str) -> list[str]:
    """Return the modules of a trained model that behave differently in evaluation mode."""
    found: list[str] = []
    inside, held, total = False, 0, 0
    for module in scene.documents.get("modules") or []:
        if not module["path"]:
            inside = module["node"] == root
        if inside:
            if any(part in module["class"] for part in _CLASSES):
                found.append(str(module["node"]))
            for facts in module["parameters"].values():
                total += facts.get("count", 1)
                held += facts.get("count", 1) if facts.get("optimized", True) else 0
    return found if held > total / 2 else []


class EvaluationInTrainingMode(Rule):
    """Calls without gradients while dropout and batch norm behave as in training."""

    name = "evaluation_in_training_mode"
    severity = "hint"
    certainty = 0.65
    definition = (
        "A trained model that contains modules which behave differently in evaluation mode "
        "(BatchNorm, Dropout) is called without gradients in training mode in at least one "
        "record, in a step or after the last one, and never in evaluation mode."
    )
    source = "Our own definition; the usual cause is a missing call to model.eval()."
    advice = "Call model.eval() before an evaluation, and model.train() after it."

    _first: dict[str, int] = per_run(dict)
    _proper = False  # whether there is an evaluation in evaluation mode

    def look_at_evaluation(self, window: Window) -> None:
        """Store the models that are evaluated in training mode."""
        self._proper |= any(not f.get(TRAINING_WITHOUT_GRADIENT) for f in window.facts)
        self.look(window)

    def look(self, window: Window) -> None:
        """Store the models that are called without gradients in training mode."""
        for step, facts in zip(window.steps.tolist(), window.facts, strict=False):
            for node in facts.get(TRAINING_WITHOUT_GRADIENT) or ():
                self._first.setdefault(str(node), step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such model."""
        if self._proper:
            return []
        for node, step in self._first.items():
            different = _different(scene, node)
            if different:
                return [
                    self.finding(
                        scene,
                        place=Place(different[0]),
                        first_step=step,
                        message=f"{node} is evaluated in training mode: without gradients, but "
                        f"modules such as {different[0]} behave as in training (random dropout, "
                        "statistics of the batch).",
                        evidence={"modules": len(different)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if scene.records else "the run has no training records"
