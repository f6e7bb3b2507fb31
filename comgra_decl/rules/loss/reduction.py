"""Losses whose reduction or label smoothing hides what the model should learn."""

from __future__ import annotations

from comgra_decl.rules.api import (
    Count,
    Finding,
    Fraction,
    LossCall,
    Rule,
    RuleParameters,
    Scene,
    comparison_missing,
    place_of,
)


class SummedParameters(RuleParameters):
    """Options of `summed_loss`."""

    least: Count = 256
    """Smallest reported number of elements."""


class SummedLoss(Rule):
    """Losses that are summed over the batch while training is unstable."""

    name = "summed_loss"
    severity = "hint"
    certainty = 0.6
    definition = (
        "A loss function sums over at least `least` elements (`reduction='sum'`), and the loss has "
        "not fallen by half. The gradients are then larger by the number of elements than those of "
        "a mean, for which learning rates are usually chosen."
    )
    source = "PyTorch's documentation of `reduction`. Our own definition."
    advice = "Use reduction='mean', or divide the loss by the number of samples."
    Parameters = SummedParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first summed loss."""
        if scene.learns:
            return []
        for call, seen in scene.calls.items():
            if call.argument("reduction") == "sum" and _terms(call) >= self.parameters.least:
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"{call.function} sums over {_terms(call)} elements instead of "
                        "averaging, so its gradients grow with the size of the batch, and steps "
                        "may be far too large.",
                        evidence={"elements": _terms(call)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return comparison_missing(scene)


def _terms(call: LossCall) -> int:
    return call.target.elements


class SmoothingParameters(RuleParameters):
    """Options of `heavy_smoothing`."""

    most: Fraction = 0.4
    """Largest usual share of label smoothing."""


class HeavySmoothing(Rule):
    """Label smoothing that hides the labels."""

    name = "heavy_smoothing"
    certainty = 0.75
    definition = "A cross-entropy is called with `label_smoothing` above `most`."
    source = "Szegedy et al., Rethinking the Inception Architecture (2016), use 0.1. Our own limit."
    advice = "Use label_smoothing=0.1 or less."
    Parameters = SmoothingParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such loss."""
        for call, seen in scene.calls.items():
            share = call.argument("label_smoothing", 0.0)
            if isinstance(share, (int, float)) and share > self.parameters.most:
                return [
                    self.finding(
                        scene,
                        place=place_of(scene, call),
                        first_step=seen.first,
                        last_step=seen.last,
                        message=f"label_smoothing={share:g} takes {share:.0%} of the weight from "
                        "the labels and spreads it over all classes, so the model learns to be "
                        "uncertain.",
                        evidence={"label_smoothing": float(share)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return comparison_missing(scene)
