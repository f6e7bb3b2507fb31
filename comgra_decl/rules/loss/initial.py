"""First losses that are much higher than the cost of guessing."""

from __future__ import annotations

from math import log, prod

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    CLASSIFICATION,
    GRAD_SCALE,
    Factor,
    Finding,
    LossRule,
    Numbers,
    RuleParameters,
    Scene,
    Window,
    classes_of,
    per_run,
    predictions,
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
        "with C classes. Targets must be integers. C is the size of the prediction's last "
        "dimension, or of its second dimension if the targets have more than one dimension. If a "
        "step contains several classifications, the sum of ln(C) is used. The rule ignores runs "
        "that also call other losses or call `backward` several times per step, and models that "
        "are at least half frozen, because such models are already trained. To allow for programs"
        " that scale their loss, the rule multiplies the largest gradient of the prediction by "
        "the batch size N. If this product is above 1, the loss is divided by it, because the "
        "gradient of a mean of cross-entropies cannot exceed 1 / N. The finding is only a hint if"
        " the loss has since fallen by half and is still near its minimum."
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
    _gradients: dict[int, float] = per_run(dict)  # of the first record, by slot of the prediction
    _looked = False
    _scaled = False

    def look(self, window: Window) -> None:
        """Store the gradients of the first record, multiplied by the batch size."""
        if self._looked or not len(window) or not window.has("abs_max"):
            return
        self._looked = True
        at = np.flatnonzero(window.table.output_gradients)
        sizes = window.read("abs_max", at, "abs_max")[0] * window.samples(at)[0]
        forward = window.table.forward[at]
        self._gradients = dict(zip(forward.tolist(), sizes.tolist(), strict=True))

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Store the first loss, and whether a gradient scaler scales it."""
        self._scaled = self._scaled or numbers.name == GRAD_SCALE
        super().look_at_numbers(numbers)

    def take(self, type_: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Store the first loss."""
        if type_ not in self._first and len(steps):
            self._first[type_] = int(steps[0]), float(values[0])

    def judge(self, scene: Scene, type_: str) -> Finding | None:
        """Compare the first loss with the cost of guessing."""
        step, loss = self._first[type_]
        known = [call.classes for call, seen in scene.calls.items() if seen.first <= step]
        several = [classes for classes in known if classes > 1] or [classes_of(scene)]
        others = any(call.function not in CLASSIFICATION for call in scene.calls)
        if min(several) < 2 or step > 0 or others or _pretrained(scene):
            return None
        if scene.objectives and len(scene.objectives[0]) > 1:  # the first one need not be a loss
            return None
        guessing = sum(log(classes) for classes in several)
        loss /= self._scale(scene)
        if not loss > self.parameters.factor * guessing:
            return None
        named = " + ".join(f"ln({classes})" for classes in several)
        return self.finding(
            scene,
            first_step=step,
            last_step=step,
            message=f"The first loss is {loss:.4g}, but guessing the class would cost {named} = "
            f"{guessing:.3f}.",
            evidence={"loss": loss, "guessing": guessing, "classes": max(several)},
            severity="hint" if scene.learns else self.severity,
        )

    def _scale(self, scene: Scene) -> float:
        """Return a lower bound on the factor by which the program multiplies its loss."""
        means = all(call.argument("reduction", "mean") == "mean" for call in scene.calls)
        if self._scaled or not means:
            return 1.0
        known = (self._gradients.get(slot, 0.0) for slot in predictions(scene))
        return max([1.0, *(size for size in known if np.isfinite(size))])


def _pretrained(scene: Scene) -> bool:
    """Return whether at least half of a trained model is frozen."""
    sizes: dict[str, list[int]] = {}  # frozen elements and all elements, by model
    model = ""
    for module in scene.documents.get("modules") or []:
        model = str(module["node"]) if not module["path"] else model
        for facts in module["parameters"].values():
            frozen, both = sizes.get(model, (0, 0))
            size = prod(facts.get("shape", ()))
            sizes[model] = [frozen + size * (facts.get("trainable") is False), both + size]
    return any(2 * frozen >= both > frozen for frozen, both in sizes.values())
