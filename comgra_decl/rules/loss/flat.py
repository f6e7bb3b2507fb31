"""A loss that does not fall."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    CurveRule,
    Field,
    Finding,
    Fraction,
    Int,
    RuleParameters,
    Scene,
)


class FlatParameters(RuleParameters):
    """What can be said of `loss_not_falling`."""

    fall: Fraction = 0.02
    """The loss must have fallen by this share of its first value."""

    least: Annotated[Int, Field(ge=10)] = 60
    """So many losses must have been heard."""


class LossNotFalling(CurveRule):
    """A loss that does not fall."""

    name = "loss_not_falling"
    severity = "warning"
    certainty = 0.6
    definition = (
        "After `least` losses or more, the mean of the last quarter is not below the mean of the "
        "first tenth by more than `fall` of it, nor by three standard errors; where a step has one "
        "loss (of two networks that train against each other none need fall)."
    )
    source = "SageMaker Debugger (less than 0.1 % over ten steps), with a test against noise."
    advice = (
        "Train on one batch only (`comgra-decl overfit-one-batch`): if even that fails, look for a "
        "cut gradient, wrong labels, a wrong sign, frozen parameters, or a learning rate that is "
        "far too small or too large."
    )
    explained_by = (
        "nonfinite",
        "gradient_scale",
        "detached",
        "untrained_parameter",
        "silent_broadcasting",
        "input_independence",
        "vanishing_gradient",
        "small_update",
        "loss_diverges",
        "probabilities_as_logits",
    )
    Parameters = FlatParameters

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares the beginning with the end."""
        if self.several:
            return None  # networks that train against each other keep each other's loss up
        curve = self.curves[type_]
        first, first_error = curve.mean(0, 0.1)
        last, last_error = curve.mean(0.75, 1)
        noise = 3 * float(np.hypot(first_error, last_error))
        fall = first - last
        if not np.isfinite(fall) or fall > min(self.parameters.fall * abs(first), max(noise, 1e-9)):
            return None
        if first < 0.05 * abs(curve.first) or abs(first) < 1e-4:
            return None  # it had fallen before the first tenth was over
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss does not fall: {first:.4g} in the first tenth, {last:.4g} in the "
            f"last quarter of {curve.count} steps.",
            evidence={"first": first, "last": last, "losses": curve.count},
        )
