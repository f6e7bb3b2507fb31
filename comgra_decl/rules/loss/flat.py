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
)


class FlatParameters(RuleParameters):
    """The options of `loss_not_falling`."""

    fall: Fraction = 0.02
    """How far the loss must fall, as a share of its first mean."""

    least: Annotated[Int, Field(ge=10)] = 60
    """The number of losses needed."""

    least_of_ended: Annotated[Int, Field(ge=10)] = 20
    """The number of losses needed once the run has ended."""

    rise: Fraction = 0.1
    """How far the loss must rise, as a share of its first mean, where there are fewer than `least`
    losses."""


class LossNotFalling(CurveRule):
    """A loss that does not fall."""

    name = "loss_not_falling"
    severity = "warning"
    certainty = 0.6
    definition = (
        "After at least `least` losses, the mean of the last quarter is not below that of the "
        "first tenth by more than `fall` of it, nor by three standard errors and a quarter of "
        "`fall`. This applies where a step has a single loss; when two networks compete, no loss "
        "has to fall. If a run has ended with fewer losses, but at least `least_of_ended`, the "
        "loss must rise: the mean of the last quarter is above that of the first quarter and above "
        "the first loss, by `rise` of each and by three standard errors. The finding is then a "
        "hint."
    )
    source = "SageMaker Debugger (less than 0.1% over ten steps), with a test against noise."
    advice = (
        "Train on a single batch (`comgra-decl overfit-one-batch`), and check that samples do not "
        "influence each other (`comgra-decl batch-mixing`). If it cannot learn the batch, look "
        "for a cut gradient, wrong labels, a wrong sign, frozen parameters, or a learning rate "
        "that is far too low or too high."
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
        "tiny_clipping",
        "lost_updates",
        "flat_logits",
        "inverted_weights",
    )
    Parameters = FlatParameters

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares the end with the start."""
        if self.several:
            return None  # networks that train against each other keep each other's loss high
        curve = self.curves[type_]
        if self._losses[type_] < self.least:  # only a run that has ended is judged by so few
            return self._rises(scene, curve)
        first, first_error = curve.mean(0, 0.1)
        last, last_error = curve.mean(0.75, 1)
        noise = 3 * float(np.hypot(first_error, last_error))
        fall = first - last
        enough = self.parameters.fall * abs(first)
        if not np.isfinite(fall) or fall > min(enough, max(noise, enough / 4, 1e-9)):
            return None
        if first < 0.05 * abs(curve.first) or abs(first) < 1e-4:
            return None  # it fell within the first tenth
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss does not fall: {first:.4g} in the first tenth, {last:.4g} in the "
            f"last quarter of {curve.count} steps.",
            evidence={"first": first, "last": last, "losses": curve.count},
        )

    def _rises(self, scene: Scene, curve: Curve) -> Finding | None:
        """Compares both ends of a short run."""
        (first, first_error), (last, last_error) = curve.mean(0, 0.25), curve.mean(0.75, 1)
        noise = 3 * float(np.hypot(first_error, last_error))
        start = max(first, curve.first)
        if not last - start > max(noise, self.parameters.rise * abs(start)):
            return None
        return self.finding(
            scene,
            first_step=curve.steps[0],
            message=f"The loss rises: {curve.first:.4g} at first, {first:.4g} in the first quarter,"
            f" {last:.4g} in the last of {curve.count} steps.",
            evidence={"first": first, "last": last, "losses": curve.count},
            severity="hint",
        )
