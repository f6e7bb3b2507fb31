"""Results of functions that have no effect, or through which no gradient flows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule, Scene


class UnusedResult(FactRule):
    """Activations, masks or normalizations whose result is not used."""

    name = "unused_result"
    certainty = 0.85
    definition = (
        "In the first records, an activation function, a softmax, a dropout, a normalization, "
        "`masked_fill` or `clamp` returns a new tensor with a gradient. No call receives this "
        "tensor, the loss does not depend on it, and it no longer exists when `backward` is "
        "called. The same holds for all results of this line in the step."
    )
    source = (
        "PyTorch's naming convention: only functions whose names end with an underscore change "
        "their argument. Our own definition."
    )
    advice = "Assign the result: x = x.masked_fill(mask, value)."
    kind = "unused"
    shown = ("function", "shape")

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} calls {fact['function']} on a tensor of shape {fact['shape']}, but "
            "nothing uses the result, so the call has no effect."
        )


class ZeroDerivative(FactRule):
    """Functions that stop the gradient because their derivative is zero."""

    name = "zero_derivative"
    severity = "error"
    certainty = 0.85
    definition = (
        "Gradients of a loss reach some parameters only through `round`, `floor`, `ceil` or "
        "`trunc`, whose derivative is zero almost everywhere, so these parameters receive zeros. "
        "This is read from autograd's graph in the first records."
    )
    source = (
        "Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (2013), on "
        "the straight-through estimator. Our own definition."
    )
    advice = (
        "Pass the gradient on with a straight-through estimator, x + (x.round() - x).detach(), or "
        "remove the function from training."
    )
    kind = "step"
    of_terms = True
    shown = ("function", "count")

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"The gradients of {fact['count']} parameters pass only through "
            f"`{str(fact['function']).lower()}`, whose derivative is zero, so these parameters "
            "are not trained."
        )


class ClampedValues(FactRule):
    """Clamps that cut off nearly all values, and with them their gradients."""

    name = "clamped_values"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the first records, `clamp` or `hardtanh` sets at least 90% of the elements of a tensor "
        "with a gradient to a limit."
    )
    source = "The derivative of a clamp is zero outside its limits. Our own limit."
    advice = (
        "Check the limits and the scale of the values. Bound values by a smooth function (sigmoid, "
        "tanh, softplus) if gradients must flow."
    )
    kind = "clamped"
    shown = ("share",)

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the clamps, beginning with the one that cuts off the most."""
        return sorted(super().chosen(scene), key=lambda fact: -float(fact["share"]))

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        limits = " and ".join(f"{limit:g}" for limit in fact["limits"])
        return (
            f"{fact['where']} clamps {fact['share']:.0%} of the values of a tensor of shape "
            f"{fact['shape']} to {limits}. No gradient flows through these elements."
        )


class AddedToItself(FactRule):
    """Sums of a tensor with itself, where another tensor was probably intended."""

    name = "added_to_itself"
    severity = "hint"
    certainty = 0.65
    definition = (
        "In the first records, a model adds a tensor with a gradient and at least two dimensions "
        "to itself: the result is twice the tensor."
    )
    source = (
        "He et al., Deep Residual Learning (2016): a residual connection adds the input of a "
        "branch to its output. Our own definition."
    )
    advice = "Add the tensor that is missing: x + branch(x), not y + y."
    kind = "added to itself"
    shown = ("shape",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds a tensor of shape {fact['shape']} to itself: another tensor, "
            "such as the input of a residual branch, was probably intended."
        )
