"""Losses that do not fall."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    Curve,
    CurveRule,
    Field,
    Finding,
    Fraction,
    Int,
    RuleParameters,
    Scene,
    has_other_terms,
)


class FlatParameters(RuleParameters):
    """Options of `loss_not_falling`."""

    fall: Fraction = 0.02
    """Smallest decrease of the loss, as a share of its first mean."""

    least: Annotated[Int, Field(ge=10)] = 60
    """Number of losses required."""

    least_of_ended: Annotated[Int, Field(ge=10)] = 20
    """Number of losses required if the run has ended."""

    rise: Fraction = 0.1
    """Increase of the loss required if there are fewer than `least` losses, as a share of its first
    mean.
    """


class LossNotFalling(CurveRule):
    """A loss that does not fall."""

    name = "loss_not_falling"
    minimizes = True
    severity = "warning"
    certainty = 0.6
    definition = (
        "The loss does not fall over at least `least` losses. It counts as falling if the mean "
        "of the last quarter is lower than the mean of the first tenth by a fraction `fall`. A "
        "smaller decrease is sufficient if it exceeds both three standard errors and a quarter of "
        "this amount. The rule applies to steps with a single loss, because the losses of "
        "competing models do not have to fall. If a run has ended with fewer losses, but at "
        "least `least_of_ended`, the rule requires the loss to have risen. The mean of the last "
        "quarter must then exceed both the first loss and the mean of the first quarter. The "
        "difference from the larger of the two must be more than `rise` times that value, and more "
        "than three standard errors. The finding is then a hint. It is also a hint if no known "
        "loss function compares a prediction with a target, or if the loss also depends on other "
        "tensors, on integers that choose among predictions or on outputs of models without "
        "gradients. Objectives with several terms and those of reinforcement learning do not have "
        "to fall."
    )
    source = (
        "SageMaker Debugger, which reports a decrease of less than 0.1% over ten steps; this rule "
        "adds a test against noise."
    )
    advice = (
        "Train on a single batch (`comgra-decl overfit-one-batch`), and check that samples do not "
        "affect each other (`comgra-decl batch-mixing`). If the model cannot fit the batch, "
        "check for cut gradients, wrong labels, a wrong sign, frozen parameters, and a learning "
        "rate that is much too low or too high."
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
        "shrinking_weight",
        "batch_as_time",
        "wrong_positions",
        "learning_rate_schedule",
        "zero_learning_rate",
        "lost_updates",
        "cleared_gradient",
        "flat_logits",
        "inverted_weights",
        "policy_sign",
        "attached_ratio",
        "entropy_weight",
        "zero_derivative",
        "unused_result",
        "unusual_momentum",
        "summed_loss",
        "clamped_values",
        "divergence_weight",
        "ascending_returns",
        "heavy_smoothing",
    )
    Parameters = FlatParameters

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compare the end of the curve with its start."""
        if self.several:
            return None  # competing models keep each other's loss high
        curve = self.curves[type_]
        if (
            self._losses[type_] < self.least
        ):  # so few losses are sufficient only if the run has ended
            return self._rises(scene, curve)
        first, first_error = curve.mean(0, 0.1)
        last, last_error = curve.mean(0.75, 1)
        noise = 3 * float(np.hypot(first_error, last_error))
        fall = first - last
        enough = self.parameters.fall * abs(first)
        if not np.isfinite(fall) or fall > min(enough, max(noise, enough / 4, 1e-9)):
            return None
        if first < 0.05 * abs(curve.first) or abs(first) < 1e-4:
            return None  # the loss fell within the first tenth
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss does not fall: {first:.4g} in the first tenth and {last:.4g} in "
            f"the last quarter of {curve.count} steps.",
            evidence={"first": first, "last": last, "losses": curve.count},
            severity="hint" if not scene.supervised or has_other_terms(scene) else self.severity,
        )

    def _rises(self, scene: Scene, curve: Curve) -> Finding | None:
        """Compare the start and the end of a short run."""
        (first, first_error), (last, last_error) = curve.mean(0, 0.25), curve.mean(0.75, 1)
        noise = 3 * float(np.hypot(first_error, last_error))
        start = max(first, curve.first)
        if not last - start > max(noise, self.parameters.rise * abs(start)):
            return None
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss rises: {curve.first:.4g} in the first step, {first:.4g} in the "
            f"first quarter and {last:.4g} in the last quarter of {curve.count} steps.",
            evidence={"first": first, "last": last, "losses": curve.count},
            severity="hint",
        )
