"""A loss that rises for good, or falls below what a loss can be."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CurveRule,
    Factor,
    Field,
    Finding,
    Int,
    RuleParameters,
    Scene,
    per_run,
    target_pairs,
)


class DivergingParameters(RuleParameters):
    """What can be said of `loss_diverges`."""

    growth: Factor = 2.0
    """So many times the smallest mean of a part of the curve."""

    least: Annotated[Int, Field(ge=10)] = 20
    """So many losses must have been heard."""


class LossDiverges(CurveRule):
    """A loss that rises for good."""

    name = "loss_diverges"
    severity = "error"
    certainty = 0.65
    definition = (
        "The mean of the last tenth of all losses is more than `growth` times the smallest mean of "
        "any tenth before and above that of the first tenth by three standard errors; or a loss is "
        "not finite."
    )
    source = "TheDeepChecker (twice the minimum); the first tenth keeps small losses out."
    advice = (
        "Lower the learning rate or warm it up, clip gradients; if the loss rises steadily from "
        "the first step, look for a wrong sign."
    )
    explained_by = ("nonfinite", "exploding_gradient", "accumulated_gradient")
    Parameters = DivergingParameters

    _nonfinite: dict[str, int] = per_run(dict)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Adds to the curve."""
        super().take(type_, steps, values)
        wild = steps[~np.isfinite(values)]
        if len(wild):
            self._nonfinite.setdefault(type_, int(wild[0]))

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares the end with the best and the first part."""
        curve = self.curves[type_]
        if type_ in self._nonfinite:
            step = self._nonfinite[type_]
            text = f"The loss is not finite from step {step} on."
            return self.finding(scene, first_step=step, message=text, certainty=0.9)
        tenths = [curve.mean(i / 10, (i + 1) / 10) for i in range(10)]
        means = np.array([mean for mean, _ in tenths])
        if len(curve.steps) < 10 or not np.isfinite(means).all():
            return None
        best = int(means[:-1].argmin())
        (last, last_error), (first, first_error) = tenths[-1], tenths[0]
        above = last - first > 3 * float(np.hypot(last_error, first_error))
        if not above or means[best] <= 0 or last <= self.parameters.growth * means[best]:
            return None
        at = curve.steps[min(len(curve.steps) - 1, (best + 1) * len(curve.steps) // 10)]
        return self.finding(
            scene,
            first_step=at,
            message=f"The loss diverges: {means[best]:.4g} at its best, {last:.4g} in the last "
            f"tenth of {curve.count} steps.",
            evidence={"best": float(means[best]), "last": last},
        )


class NegativeParameters(RuleParameters):
    """What can be said of `negative_loss`."""

    growth: Factor = 10.0
    """A loss of numbers that falls to so many times its first, negative mean has no end."""


class NegativeLoss(CurveRule):
    """A loss that is negative where it cannot be."""

    name = "negative_loss"
    severity = "error"
    certainty = 0.85
    definition = (
        "The loss is below -0.001 although its targets are classes (integers), so that it should "
        "be a negative log-likelihood, which is not negative; in at least a tenth of all losses. "
        "Or, with targets that are numbers: it is negative in nine of ten and falls without end, "
        "the last tenth's mean being `growth` times that of the first tenth."
    )
    source = "AutoTrainer (negative where impossible); a wrong sign is the usual reason."
    advice = "Look for a minus sign, or for nll_loss of probabilities instead of their logarithm."
    Parameters = NegativeParameters

    _negative: dict[str, list[int]] = per_run(dict)  # how many, the first step

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Counts negative losses."""
        super().take(type_, steps, values)
        below = steps[values < -1e-3]
        if len(below):
            known = self._negative.setdefault(type_, [0, int(below[0])])
            known[0] += len(below)

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Asks what the targets are."""
        count, first = self._negative.get(type_, [0, 0])
        classes = any("int" in target.dtype for _, target in target_pairs(scene))
        if not classes:
            return self._endless(scene, type_, count, first)
        if count < max(3, 0.1 * self._heard[type_]):
            return None
        return self.finding(
            scene,
            first_step=first,
            message=f"The loss is negative from step {first} on, although its targets are classes.",
            evidence={"negative": count},
        )

    def _endless(self, scene: Scene, type_: str, count: int, first: int) -> Finding | None:
        """Asks whether a loss of numbers, which may be negative, falls without end."""
        curve = self.curves[type_]
        (start, _), (end, _) = curve.mean(0, 0.1), curve.mean(0.9, 1)
        often = count >= max(20, 0.9 * self._heard[type_])
        if self.several or not often or not end < self.parameters.growth * start < 0:
            return None
        return self.finding(
            scene,
            first_step=first,
            message=f"The loss is negative and falls without end, from {start:.4g} to {end:.4g}: "
            "whatever it measures is made as large as can be.",
            evidence={"first": start, "last": end},
            severity="warning",
        )
