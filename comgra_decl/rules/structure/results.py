"""Results of functions that have no effect, or through which no gradient flows."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Place, Rule, Scene, calls_missing, loss_missing


class UnusedResult(Rule):
    """Activations, masks or normalizations whose result is not used."""

    name = "unused_result"
    certainty = 0.85
    definition = (
        "In the first records, an activation function, a softmax, a dropout, a normalization, "
        "`masked_fill` or `clamp` returns a new tensor with a gradient. No call receives this "
        "tensor, the loss does not depend on it, and it no longer exists when `backward` is called."
    )
    source = (
        "PyTorch's naming convention: only functions whose names end with an underscore change "
        "their argument. Our own definition."
    )
    advice = "Assign the result: x = x.masked_fill(mask, value)."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such call."""
        found = scene.told("unused")
        if not found:
            return []
        fact = found[0]
        return [
            self.finding(
                scene,
                place=Place(str(fact["where"])),
                first_step=0,
                message=f"{fact['where']} calls {fact['function']} on a tensor of shape "
                f"{fact['shape']}, but nothing uses the result, so the call has no effect.",
                evidence={"function": str(fact["function"]), "shape": str(fact["shape"])},
                also=len({each["where"] for each in found}) - 1,
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


class ZeroDerivative(Rule):
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

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such function."""
        for term in scene.terms("step"):
            function, count = str(term["function"]).lower(), int(term["count"])
            return [
                self.finding(
                    scene,
                    first_step=0,
                    message=f"The gradients of {count} parameters pass only through `{function}`, "
                    "whose derivative is zero, so these parameters are not trained.",
                    evidence={"function": function, "parameters": count},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class ClampedValues(Rule):
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

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the clamp that cuts off the most."""
        found = sorted(scene.told("clamped"), key=lambda fact: -float(fact["share"]))
        if not found:
            return []
        fact = found[0]
        share, limits = float(fact["share"]), " and ".join(f"{x:g}" for x in fact["limits"])
        return [
            self.finding(
                scene,
                place=Place(str(fact["where"])),
                first_step=0,
                message=f"{fact['where']} clamps {share:.0%} of the values of a tensor of shape "
                f"{fact['shape']} to {limits}. No gradient flows through these elements.",
                evidence={"share": share},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


class AddedToItself(Rule):
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

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such sum."""
        found = scene.told("added to itself")
        if not found:
            return []
        fact = found[0]
        return [
            self.finding(
                scene,
                place=Place(str(fact["where"])),
                first_step=0,
                message=f"{fact['where']} adds a tensor of shape {fact['shape']} to itself: "
                "another tensor, such as the input of a residual branch, was probably intended.",
                evidence={"shape": str(fact["shape"])},
                also=len({each["where"] for each in found}) - 1,
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)
