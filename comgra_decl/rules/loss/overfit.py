"""A validation loss that rises while the training's falls."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    EVALUATION_TYPES,
    Count,
    Curve,
    Finding,
    Numbers,
    Positive,
    Rule,
    RuleParameters,
    Scene,
    Share,
    is_validation,
    per_run,
)


class OverfitParameters(RuleParameters):
    """What can be said of `overfitting`."""

    rise: Positive = 0.1
    """The validation loss rises by this share of its smallest value."""

    gap: Share = 0.8
    """The training's loss is below this share of the validation's."""

    patience: Count = 3
    """For so many validations in a row it must be so."""


class Overfitting(Rule):
    """A validation loss that rises while the training's falls."""

    name = "overfitting"
    certainty = 0.7
    definition = (
        "A number that is said during evaluations and is called a loss (`val_loss`, `loss` of type "
        "eval, ...) is above its smallest value by `rise` of it for `patience` times in a row, "
        "while the training's loss goes on falling, below `gap` of the validation's."
    )
    source = "SageMaker Debugger ((val - train) / train > 0.1), with patience."
    advice = (
        "Stop early, at the smallest validation loss; regularise (weight decay, dropout, "
        "augmentation), use more data or a smaller network."
    )
    explained_by = ("nonfinite", "loss_diverges")
    Parameters = OverfitParameters

    _train = per_run(Curve)
    _validation: dict[str, list[tuple[int, float]]] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Takes losses of both kinds."""
        if numbers.name == "loss" and numbers.type not in EVALUATION_TYPES:
            self._train.add(numbers.steps, numbers.values)
        elif is_validation(numbers):
            known = self._validation.setdefault(f"{numbers.name} ({numbers.type})", [])
            known += zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True)
            if len(known) > 10_000:
                del known[1::2]

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns the first number that says so."""
        for name, known in self._validation.items():
            found = self._judge(scene, name, known)
            if found is not None:
                return [found]
        return []

    def _judge(self, scene: Scene, name: str, known: list[tuple[int, float]]) -> Finding | None:
        values = np.array([value for _, value in known])
        patience = self.parameters.patience
        if (
            len(values) < patience + 1
            or not np.isfinite(values).all()
            or len(self._train.steps) < 4
        ):
            return None
        best = int(values.argmin())
        above = values[best + 1 :] > (1 + self.parameters.rise) * values[best]
        (middle, _), (end, _) = self._train.mean(0.25, 0.5), self._train.mean(0.75, 1)
        if len(above) < patience or not above[-patience:].all() or values[best] <= 0:
            return None
        if not (end < middle and end < self.parameters.gap * values[-1]):
            return None
        return self.finding(
            scene,
            first_step=known[best][0],
            message=f"{name} rises from {values[best]:.4g} (step {known[best][0]}) to "
            f"{values[-1]:.4g} while the training's loss falls to {end:.4g}: it learns by heart.",
            evidence={"best": float(values[best]), "last": float(values[-1]), "train": end},
        )

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if not self._validation:
            return "nobody said a validation loss; say comgra.kpi('val_loss', value)"
        return None
