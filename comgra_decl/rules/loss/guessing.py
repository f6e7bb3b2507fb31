"""Classifiers that know no more than how often each class comes."""

from __future__ import annotations

from math import log
from typing import Annotated, Any

import numpy as np

from comgra_decl.rules.api import (
    ClassCounts,
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
    Window,
    classes_of,
    is_validation,
    per_run,
)

_NEAR = (0.7, 1.7)  # of ln C: a first loss outside is no mean cross-entropy, or not a beginner's


class GuessingParameters(RuleParameters):
    """What can be said of `no_better_than_guessing`."""

    gain: Fraction = 0.03
    """The loss is not below what guessing costs by this share of it."""

    learned: Fraction = 0.2
    """The training's loss is below what guessing costs by this share of it, and the validation's
    is not below it at all: what was learned was learned by heart."""

    least: Annotated[Int, Field(ge=20)] = 100
    """So many losses must have been heard, and twice as many targets counted."""

    patience: Count = 3
    """So many validations are needed."""


class NoBetterThanGuessing(CurveRule):
    """Classifiers that know no more than how often each class comes."""

    name = "no_better_than_guessing"
    certainty = 0.65
    definition = (
        "Guessing costs H = -sum p ln p, p being the shares of the classes among the recorded "
        "targets (integers, one per sample). The mean loss of the last quarter is within `gain` of "
        "H or above it, by no more than a tenth, and has not fallen since the quarter before by "
        "two standard errors: the input tells nothing about the target. Or the training's last "
        "tenth is below H by `learned` of it while the smallest of `patience` validation losses or "
        "more is above H by `gain` or nearer to it: what was learned does not carry over. "
        "Only where the first loss is that of a beginner, 0.7 to 1.7 times ln(classes)."
    )
    source = (
        "The entropy of the labels is what the best constant answer costs; Zhang et al., "
        "Understanding deep learning requires rethinking generalization (2017), on random labels."
    )
    advice = (
        "Look at some samples beside their labels: are they shuffled apart, permuted, off by one, "
        "or noise? Is the input what the label is about, and prepared alike in both? If they are "
        "right, train longer or with another learning rate."
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
        "dead_units",
        "loss_diverges",
        "probabilities_as_logits",
    )
    Parameters = GuessingParameters

    _counts = per_run(ClassCounts)
    _best: dict[str, tuple[int, int, float]] = per_run(dict)  # count, step and value of the least

    def look(self, window: Window) -> None:
        """Counts classes."""
        self._counts.look(window)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Takes losses of both kinds."""
        if is_validation(numbers):
            self._take_validation(f"{numbers.name} ({numbers.type})", numbers)
        else:
            super().look_at_numbers(numbers)

    def _take_validation(self, name: str, numbers: Numbers) -> None:
        for step, value in zip(numbers.steps.tolist(), numbers.values.tolist(), strict=True):
            count, at, best = self._best.get(name, (0, step, float("inf")))
            at, best = (step, value) if value < best else (at, best)
            self._best[name] = count + 1, at, best

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares both losses with the entropy of the labels."""
        entropy, classes = self._entropy(scene)
        curve = self.curves[type_]
        start, _ = curve.mean(0, 0.02)
        if self.several or not entropy or not _NEAR[0] < start / log(classes) < _NEAR[1]:
            return None
        return self._stays(scene, curve, entropy) or self._by_heart(scene, curve, entropy)

    def _stays(self, scene: Scene, curve: Curve, entropy: float) -> Finding | None:
        (before, spread), (last, error) = curve.mean(0.5, 0.75), curve.mean(0.75, 1)
        falls = before - last > 2 * float(np.hypot(spread, error))
        if falls or not (1 - self.parameters.gain) * entropy < last < 1.1 * entropy:
            return None
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss stays at {last:.4g}, which is what guessing by the frequency of the "
            f"classes costs ({entropy:.4g}): the input tells the network nothing about its target.",
            evidence={"loss": last, "guessing": entropy},
        )

    def _by_heart(self, scene: Scene, curve: Curve, entropy: float) -> Finding | None:
        last, _ = curve.mean(0.9, 1)
        if not last < (1 - self.parameters.learned) * entropy:
            return None
        for name, (count, step, best) in self._best.items():
            if count >= self.parameters.patience and best > (1 - self.parameters.gain) * entropy:
                return self.finding(
                    scene,
                    first_step=step,
                    message=f"{name} never was below {best:.4g}, and guessing by the frequency of "
                    f"the classes costs {entropy:.4g}, while the training's loss fell to "
                    f"{last:.4g}: what was learned was learned by heart.",
                    evidence={"validation": best, "guessing": entropy, "train": last},
                )
        return None

    def _entropy(self, scene: Scene) -> tuple[float, int]:
        """Returns the entropy of the labels and the number of classes; 0 where it is not known."""
        classes, known = classes_of(scene), self._known()
        total = sum(known.values())
        if classes < 2 or len(known) < 2 or total < 2 * self.least:
            return 0.0, classes
        shares = np.array([*known.values()]) / total
        return float(-(shares * np.log(shares)).sum()), classes

    def _known(self) -> dict[int, int]:
        counted: Any = self._counts.by_slot.values()
        return max(counted, key=lambda known: sum(known.values()), default={})

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if not scene.has_histograms:
            return "no histograms are recorded; set `histogram: {bins: 64}`"
        if self._counts.most < 2 * self.least:
            return (
                f"it takes {2 * self.least} targets that are classes, one per sample; "
                f"{self._counts.most} were recorded"
            )
        return super().missing(scene)
