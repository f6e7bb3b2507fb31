"""Validation losses that rise while the training loss falls."""

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
    """Options of `overfitting`."""

    rise: Positive = 0.1
    """Largest allowed increase of the validation loss, as a share of its lowest value."""

    gap: Share = 0.8
    """Largest training loss that indicates overfitting, as a share of the validation loss."""

    patience: Count = 3
    """Number of consecutive validations that must meet the condition."""


class Overfitting(Rule):
    """A validation loss that rises while the training loss falls."""

    name = "overfitting"
    certainty = 0.7
    definition = (
        "A loss logged during evaluations (`val_loss`, `loss` of type eval, ...) exceeds its "
        "lowest value by more than `rise` times that value, `patience` times in a row. "
        "Meanwhile, the training loss keeps falling and is below `gap` times the validation loss."
    )
    source = (
        "SageMaker Debugger, which reports (val - train) / train > 0.1; this rule adds `patience`."
    )
    advice = (
        "Stop training at the lowest validation loss. Add regularization (weight decay, dropout, "
        "augmentation), use more data, or use a smaller model."
    )
    explained_by = ("nonfinite", "loss_diverges", "repeated_batch")
    Parameters = OverfitParameters

    _train = per_run(Curve)
    _validation: dict[str, list[tuple[int, float]]] = per_run(dict)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add training and validation losses."""
        if numbers.name == "loss" and numbers.type not in EVALUATION_TYPES:
            self._train.add(numbers.steps, numbers.values)
        elif is_validation(numbers):
            known = self._validation.setdefault(f"{numbers.name} ({numbers.type})", [])
            known += zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True)
            if len(known) > 10_000:
                del known[1::2]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first metric that meets the condition."""
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
            f"{values[-1]:.4g} while the training loss falls to {end:.4g}: the model overfits.",
            evidence={"best": float(values[best]), "last": float(values[-1]), "train": end},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not self._validation:
            return "no validation loss is logged; call comgra.kpi('val_loss', value)"
        return None
