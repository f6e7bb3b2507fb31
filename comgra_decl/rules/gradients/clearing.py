"""Gradients that are not cleared, or are cleared at the wrong time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule, Finding, Rule, Scene, loss_missing


class StaleGradient(Rule):
    """Optimizer steps that use gradients left over from before the previous step."""

    name = "stale_gradient"
    severity = "error"
    certainty = 0.85
    definition = (
        "In the second record, the parameters have nonzero gradients when a backward pass begins "
        "after an optimizer step. The backward pass adds to these gradients, and the next "
        "optimizer step uses the sum. The gradients of the previous step, or those of another "
        "loss, such as the generator's in the discriminator, were not cleared. The rule does not "
        "report gradients that accumulate between two optimizer steps, or leftover gradients that "
        "are cleared before they are used. At most 16 parameters are checked for each loss."
    )
    source = (
        "PyTorch's documentation of `Optimizer.zero_grad`: `backward` adds to existing gradients. "
        "Our own definition."
    )
    advice = (
        "Call the optimizer's `zero_grad()` immediately before the backward pass whose gradients "
        "it uses."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first optimizer that uses such gradients."""
        for fact in scene.told("stale gradient"):
            several = len(scene.optimizers) > 1
            which = f" with parameters of shape {fact['shapes'][0]}" if several else ""
            return [
                self.finding(
                    scene,
                    first_step=1,
                    message=f"{fact['optimizer']}{which} steps with gradients that were not "
                    "cleared: before the backward pass, its parameters already had gradients "
                    "from before the previous optimizer step.",
                    evidence={"parameters": int(fact["count"])},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)


class ClearedGradient(FactRule):
    """Gradients that are cleared before the optimizer uses them."""

    name = "cleared_gradient"
    severity = "error"
    certainty = 0.95
    definition = (
        "In the first two records, a backward pass leaves nonzero gradients in parameters, but "
        "when the optimizer of these parameters steps, all of them are None or zero. At most 16 "
        "parameters are checked for each loss."
    )
    source = (
        "PyTorch's documentation of `Optimizer.step`, which skips parameters whose gradient is "
        "None. Our own definition."
    )
    advice = "Call `zero_grad()` before `backward()` or after `step()`, not between them."
    kind = "cleared gradient"

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['optimizer']} steps without gradients: the backward pass computes gradients "
            f"for its parameters, for example of shape {fact['shapes'][0]}, but they are cleared "
            "before the step, so nothing is trained."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return loss_missing(scene)
