"""Attention scores that are not scaled by the width of the heads."""

from __future__ import annotations

from comgra_decl.rules.api import Finding, Place, Rule, Scene, calls_missing


class UnscaledAttention(Rule):
    """Attention scores that are not divided by the root of the width."""

    name = "unscaled_attention"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the first records, a softmax over the last dimension receives the product of two "
        "computed tensors of at least three dimensions and a width of at least 16, with or "
        "without a mask. Neither the product nor anything it is computed from was multiplied by a "
        "number below 1 or divided."
    )
    source = (
        "Vaswani et al., Attention Is All You Need (2017), section 3.2.1: large products push the "
        "softmax into regions where its gradient is small."
    )
    advice = "Divide the scores by the root of the width: q @ k.transpose(-2, -1) / d ** 0.5."

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such softmax."""
        for fact in scene.told("unscaled"):
            return [
                self.finding(
                    scene,
                    place=Place(str(fact["where"])),
                    first_step=0,
                    message=f"{fact['where']} applies a softmax to scores of shape {fact['shape']} "
                    "that are not divided by the root of their width: attention becomes sharper "
                    "the wider the heads are.",
                    evidence={"shape": str(fact["shape"])},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)
