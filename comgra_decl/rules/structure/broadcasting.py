"""Predictions and targets whose shapes are broadcast against each other."""

from __future__ import annotations

from math import prod

import numpy as np

from comgra_decl.rules.api import (
    ELEMENTWISE,
    Finding,
    LossCall,
    Rule,
    Scene,
    comparison_missing,
    place_of,
)

_ADVICE = "Pass tensors of the same shape to the loss, for example by calling squeeze(-1)."


class SilentBroadcasting(Rule):
    """Shapes that are broadcast, so that each prediction is compared with every target."""

    name = "silent_broadcasting"
    severity = "error"
    certainty = 0.95
    definition = (
        "An element-wise loss (`mse_loss`, `l1_loss`, `smooth_l1_loss`, `huber_loss` or a "
        "subtraction) receives a prediction and a target with different numbers of dimensions, "
        "such as [64, 1] and [64]. The two are broadcast to more elements than either of them "
        "has, so that every prediction is compared with every target. Also reported: a prediction "
        "of shape [n] and a target of shape [n, n], and a loss function whose prediction has the "
        "shape [n, 1] and whose target has more columns. The "
        "rule checks the shapes "
        "passed to the function. In a subtraction, the longer shape must end in 1, or have a 1 "
        "next to the batch dimension and at least two more dimensions. Other shapes are ignored, "
        "because they are common in the computation of distances. However the difference is "
        "written, autograd's graph shows whether an output of shape [n, 1] or [n] minus data has "
        "the shape [n, n]; an output that was reshaped for it is ignored. Subtractions are also "
        "ignored if a loss contains the differences of outputs from each other, [n, n]."
    )
    source = (
        "The first bug in the book chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = _ADVICE

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first call whose shapes do not match."""
        pairs = any(scene.terms("pairwise"))
        for call, seen in scene.calls.items():
            if not _misfit(call) or (pairs and _is_subtraction(call)):
                continue
            a, b = list(call.prediction.shape), list(call.target.shape)
            result = list(np.broadcast_shapes(call.prediction.shape, call.target.shape))
            return [
                self.finding(
                    scene,
                    place=place_of(scene, call),
                    first_step=seen.first,
                    last_step=seen.last,
                    message=f"{_named(call)} receives a prediction of shape {a} and a target of "
                    f"shape {b}, which are broadcast to {result}, so every prediction is compared "
                    "with every target.",
                    advice=_advice(call),
                    evidence={"prediction": str(a), "target": str(b), "result": str(result)},
                )
            ]
        for term in scene.terms("broadcast"):
            shapes = {name: str(term[name]) for name in ("prediction", "result")}
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"A loss subtracts data from a prediction of shape "
                    f"{shapes['prediction']}, and the difference has the shape "
                    f"{shapes['result']}: every prediction is compared with every target.",
                    advice=_ADVICE,
                    evidence=shapes,
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if scene.objectives else comparison_missing(scene)


def _misfit(call: LossCall) -> bool:
    a, b = call.prediction.shape, call.target.shape
    if call.function not in ELEMENTWISE or a == b or not a or not b:
        return False
    if len(a) == len(b):  # a target that was itself broadcast; a difference may be meant so
        named = not _is_subtraction(call)
        return named and len(a) > 1 and a[1:] == (1,) * (len(a) - 1) and prod(b) > prod(a)
    try:
        result = np.broadcast_shapes(a, b)
    except ValueError:
        return False
    if prod(result) <= max(prod(a), prod(b)):
        return len(a) == 1 and b == (a[0], a[0])  # a target that was itself broadcast
    longer = max(a, b, key=len)
    distances = len(longer) == 3 and longer[-1] != 1  # [n, 1, d] - [m, d]
    return not (_is_subtraction(call) and distances)


def _is_subtraction(call: LossCall) -> bool:
    return call.function.endswith(("sub", "sub__"))


def _named(call: LossCall) -> str:
    return "A subtraction" if _is_subtraction(call) else call.function


def _advice(call: LossCall) -> str:
    a, b = call.prediction.shape, call.target.shape
    longer, name = (a, "prediction") if len(a) > len(b) else (b, "target")
    shorter = "target" if name == "prediction" else "prediction"
    ones = [dim for dim, size in enumerate(longer) if size == 1]
    if not ones or len(a) == len(b):
        return "Pass tensors of the same shape to the loss."
    dim = -1 if longer[-1] == 1 else ones[0]
    return (
        f"Pass tensors of the same shape to the loss: `{name}.squeeze({dim})` or "
        f"`{shorter}.unsqueeze({dim})`."
    )
