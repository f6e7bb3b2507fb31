"""Classifiers that are no better than guessing by class frequency."""

from __future__ import annotations

from math import log
from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Curve,
    CurveRule,
    Field,
    Finding,
    Fraction,
    Int,
    Numbers,
    RuleParameters,
    Scene,
    Validations,
    Window,
    classes_of,
    is_validation,
    per_run,
)

_NEAR = (
    0.7,
    1.7,
)  # times ln C; other losses are no mean cross-entropy, or the model is already trained


class GuessingParameters(RuleParameters):
    """Options of `no_better_than_guessing`."""

    gain: Fraction = 0.03
    """Smallest amount by which the loss must beat guessing, as a share of the cost of guessing."""

    learned: Fraction = 0.2
    """Amount by which the training loss must beat guessing to indicate memorization, as a share of
    the cost of guessing.
    """

    least: Annotated[Int, Field(ge=20)] = 100
    """Number of losses required; half as many targets are required."""

    patience: Count = 3
    """Number of validation losses required."""

    little: Fraction = 0.12
    """Largest amount by which a loss that hardly falls beats guessing, as a share of its cost."""

    many: Count = 300
    """Number of losses required to report that."""


class NoBetterThanGuessing(CurveRule):
    """A classifier that is no better than guessing by class frequency."""

    name = "no_better_than_guessing"
    certainty = 0.65
    definition = (
        "Guessing costs H = -sum p ln p, where p are the class frequencies of the recorded "
        "targets (integers, one per sample). The rule reports two cases. First, the mean loss of "
        "the last quarter is at most `gain` times H below H or at most a tenth above it, and has "
        "not fallen by two standard errors since the previous quarter. In this case, the input "
        "provides no information about the target. Second, the mean training loss over the last "
        "tenth of the steps is at least `learned` times H below H, but at least `patience` "
        "validation losses were logged and none of them is more than `gain` times H below H. In "
        "this case, the model learns nothing that generalizes. As a hint, it also reports a mean "
        "loss of the last quarter that is at most `little` times H below H, after `many` losses: "
        "it may fall only because the model memorizes its training data. The rule "
        f"applies only if the first loss is {_NEAR[0]} "
        f"to {_NEAR[1]} times ln(classes), as for an untrained model."
    )
    source = (
        "The entropy of the labels is the cost of the best constant prediction. On random labels: "
        "Zhang et al., Understanding deep learning requires rethinking generalization (2017)."
    )
    advice = (
        "Check some samples and their labels. Labels may be shuffled independently, permuted, off "
        "by one, or random. Check that the input contains the information required to predict the "
        "label, and that training and validation use the same preprocessing. If so, train longer "
        "or change the learning rate."
    )
    explained_by = (
        "nonfinite",
        "gradient_scale",
        "detached",
        "untrained_parameter",
        "input_independence",
        "single_class",
        "vanishing_gradient",
        "small_update",
        "loss_diverges",
        "probabilities_as_logits",
        "shrinking_weight",
        "repeated_batch",
        "batch_as_time",
        "wrong_positions",
        "learning_rate_schedule",
        "zero_learning_rate",
        "tiny_clipping",
        "lost_updates",
        "cleared_gradient",
        "flat_logits",
        "inverted_weights",
        "zero_derivative",
        "unusual_momentum",
        "summed_loss",
        "clamped_values",
        "heavy_smoothing",
    )
    Parameters = GuessingParameters

    _validations = per_run(Validations)

    def look(self, window: Window) -> None:
        """Count the classes in the targets."""
        self.scene.count_classes(window)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Add training and validation losses."""
        if is_validation(numbers):
            self._validations.look(numbers)
        else:
            super().look_at_numbers(numbers)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compare the training and validation losses with the entropy of the labels."""
        entropy, classes = self._entropy(scene)
        curve = self.curves[type_]
        start, _ = curve.mean(0, 0.02)
        if self.several or not entropy or not _NEAR[0] < start / log(classes) < _NEAR[1]:
            return None
        return (
            self._stays(scene, curve, entropy)
            or self._memorises(scene, curve, entropy)
            or self._hardly_falls(scene, curve, entropy)
        )

    def _stays(self, scene: Scene, curve: Curve, entropy: float) -> Finding | None:
        (before, spread), (last, error) = curve.mean(0.5, 0.75), curve.mean(0.75, 1)
        falls = before - last > 2 * float(np.hypot(spread, error))
        if falls or not (1 - self.parameters.gain) * entropy < last < 1.1 * entropy:
            return None
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss stays at {last:.4g}, the cost of guessing by class frequency "
            f"({entropy:.4g}). The model finds no information about the target in the input.",
            evidence={"loss": last, "guessing": entropy},
        )

    def _hardly_falls(self, scene: Scene, curve: Curve, entropy: float) -> Finding | None:
        last, _ = curve.mean(0.75, 1)
        if curve.count < self.parameters.many:
            return None
        if not (1 - self.parameters.little) * entropy < last < 1.1 * entropy:
            return None
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"After {curve.count} steps, the loss is {last:.4g}, and guessing by class "
            f"frequency costs {entropy:.4g}. The model finds little information about the target "
            "in the input, or only memorizes its training data.",
            evidence={"loss": last, "guessing": entropy},
            severity="hint",
            certainty=0.5,
        )

    def _memorises(self, scene: Scene, curve: Curve, entropy: float) -> Finding | None:
        last, _ = curve.mean(0.9, 1)
        if not last < (1 - self.parameters.learned) * entropy:
            return None
        above = self._validations.always_above(
            (1 - self.parameters.gain) * entropy, least=self.parameters.patience
        )
        if above is None:
            return None
        name, step, best = above
        return self.finding(
            scene,
            first_step=step,
            message=f"{name} never falls below {best:.4g} (guessing by class frequency "
            f"costs {entropy:.4g}), while the training loss falls to {last:.4g}: the "
            "model memorizes its training data.",
            evidence={"validation": best, "guessing": entropy, "train": last},
        )

    def _entropy(self, scene: Scene) -> tuple[float, int]:
        """Return the entropy of the labels (0 if unknown) and the number of classes."""
        classes, known = classes_of(scene), self._known(scene)
        total = sum(known.values())
        if classes < 2 or len(known) < 2 or total < 2 * self.least:
            return 0.0, classes
        shares = np.array([*known.values()]) / total
        return float(-(shares * np.log(shares)).sum()), classes

    def _known(self, scene: Scene) -> dict[int, int]:
        counted = scene.classes.by_slot.values()
        return max(counted, key=lambda known: sum(known.values()), default={})

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if not scene.has_histograms:
            return "no histograms are recorded; set `histogram: {bins: 64}`"
        if scene.classes.most < 2 * self.least:
            return (
                f"it needs {2 * self.least} class targets, one per sample; "
                f"the run has {scene.classes.most}"
            )
        return super().missing(scene)
