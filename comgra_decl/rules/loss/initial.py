"""First losses that are much higher than the cost of guessing."""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    Factor,
    Finding,
    LossRule,
    RuleParameters,
    Scene,
    classes_of,
    per_run,
)


class InitialParameters(RuleParameters):
    """Options of `initial_loss`."""

    factor: Factor = 1.7
    """Largest allowed first loss, as a multiple of ln(classes)."""


class InitialLoss(LossRule):
    """A first loss that is much higher than the cost of guessing."""

    name = "initial_loss"
    certainty = 0.7
    definition = (
        "The first loss is above `factor` times ln(C), the expected loss of an untrained model "
        "with C classes. C is the size of the prediction's last dimension, or of its second "
        "dimension if targets have more than one dimension; targets are integers. If a step "
        "contains several classifications, the sum of ln(C) is used. Runs that also call other "
        "losses are ignored."
    )
    source = (
        "The book chapter 'Debugging: Visualizing Activation Maps & Gradients' expects ln C and "
        "calls a loss of 50 far too high. TheDeepChecker allows a deviation of 100%."
    )
    advice = (
        "Use smaller initial weights in the last layer, normalize its inputs, and check the scale "
        "of the data. Check whether the loss is summed instead of averaged."
    )
    explained_by = ("nonfinite", "input_scale", "poor_initialisation", "batch_mixing")
    Parameters = InitialParameters

    _first: dict[str, tuple[int, float]] = per_run(dict)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Stores the first loss."""
        if type_ not in self._first and len(steps):
            self._first[type_] = int(steps[0]), float(values[0])

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares the first loss with the cost of guessing."""
        step, loss = self._first[type_]
        known = [call.classes for call, seen in scene.calls.items() if seen.first <= step]
        several = [classes for classes in known if classes > 1] or [classes_of(scene)]
        others = any(call.function not in CLASSIFICATION for call in scene.calls)
        if min(several) < 2 or step > 0 or others:
            return None
        guessing = sum(log(classes) for classes in several)
        if not loss > self.parameters.factor * guessing:
            return None
        named = " + ".join(f"ln({classes})" for classes in several)
        return self.finding(
            scene,
            first_step=step,
            last_step=step,
            message=f"The first loss is {loss:.4g}; guessing the class would cost {named} = "
            f"{guessing:.3f}.",
            evidence={"loss": loss, "guessing": guessing, "classes": max(several)},
        )
