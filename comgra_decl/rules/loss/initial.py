"""A first loss that is far from what guessing costs."""

from __future__ import annotations

from math import log

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Factor,
    Finding,
    LossRule,
    RuleParameters,
    Scene,
    classes_of,
    per_run,
)


class InitialParameters(RuleParameters):
    """What can be said of `initial_loss`."""

    factor: Factor = 1.7
    """So many times ln(classes) is too much."""


class InitialLoss(LossRule):
    """A first loss that is far above what guessing costs."""

    name = "initial_loss"
    certainty = 0.7
    definition = (
        "The first loss is above `factor` times ln(C), C being the number of classes: the last "
        "dimension of the answer (or the second, where targets have further ones), where targets "
        "are integers. A network that knows nothing should lose ln(C)."
    )
    source = "The debugging chapter (ln C; 50 is far off); TheDeepChecker (100 % deviation)."
    advice = (
        "Make the last layer's initial weights smaller, normalise what enters it, and look at the "
        "scale of inputs; see whether the loss is summed where it should be averaged."
    )
    explained_by = ("nonfinite", "input_scale", "poor_initialisation")
    Parameters = InitialParameters

    _first: dict[str, tuple[int, float]] = per_run(dict)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Remembers the first one."""
        if type_ not in self._first and len(steps):
            self._first[type_] = int(steps[0]), float(values[0])

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compares it with guessing."""
        step, loss = self._first[type_]
        classes = classes_of(scene)
        if classes < 2 or step > 0 or not loss > self.parameters.factor * log(classes):
            return None
        return self.finding(
            scene,
            first_step=step,
            last_step=step,
            message=f"The first loss is {loss:.4g}; guessing among {classes} classes costs "
            f"ln({classes}) = {log(classes):.3f}.",
            evidence={"loss": loss, "guessing": log(classes), "classes": classes},
        )
