"""What the pictures of probes show: attributions in the wrong place, or that cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comgra_decl.rules.api import (
    PICTURE_CHECKS,
    Count,
    Finding,
    Fraction,
    Place,
    Rule,
    RuleParameters,
    Scene,
    Share,
)


class PictureRule(Rule):
    """A rule that reads the newest record of each probe with pictures."""

    needs = "attributions"

    def records(self, scene: Scene) -> dict[str, dict[str, Any]]:
        """Return what is known about the pictures of each probe."""
        found = scene.documents.get(PICTURE_CHECKS)
        return found if isinstance(found, dict) else {}

    def pictures(self, scene: Scene) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield (name, step, numbers) for each picture."""
        for record in self.records(scene).values():
            for name, numbers in record["pictures"].items():
                yield name, int(record["step"]), numbers

    def usable(self, scene: Scene) -> bool:
        """Return whether there is something to check."""
        raise NotImplementedError

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self.usable(scene) else f"it needs {self.needs}; see `docs/pictures.md`"


class OutsideParameters(RuleParameters):
    """Options of `attribution_outside_mask`."""

    share: Fraction = 0.5
    """Smallest share of the attribution outside the mask that is reported."""

    after: Count = 20
    """Earliest step that is considered, because an untrained model looks anywhere."""


class AttributionOutsideMask(PictureRule):
    """Attributions that lie outside the part of the input that should matter."""

    name = "attribution_outside_mask"
    certainty = 0.7
    definition = (
        "The probe declares a `mask`. Of the magnitude of a picture at the last record, from step "
        "`after` on, more than `share` lies outside the mask, as a mean over the samples. The "
        "magnitudes of channels are added up. For Grad-CAM of a smaller layer, the mask is "
        "averaged over the area of each place. Checked at the end of a run."
    )
    source = (
        "Lapuschkin et al., Unmasking Clever Hans predictors (2019): predictions for the wrong "
        "reasons are visible as attributions outside the object."
    )
    advice = (
        "Look at the samples next to this picture: what lies there, and is it in all samples of a "
        "class (a watermark, a border, a background)? Remove it from some samples, and check "
        "whether the prediction changes; then remove it from the training data."
    )
    needs = "pictures of a probe with a `mask`"
    Parameters = OutsideParameters

    def usable(self, scene: Scene) -> bool:
        """Return whether a picture was compared with a mask."""
        after = self.parameters.after
        return any("outside" in n and step >= after for _, step, n in self.pictures(scene))

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        early = [step for _, step, n in self.pictures(scene) if "outside" in n]
        if early and not self.usable(scene):
            return (
                f"it needs a record of the probe from step {self.parameters.after} on; the last "
                f"one is at step {max(early)}"
            )
        return super().missing(scene)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the picture with the largest share outside."""
        found = [
            (numbers.get("outside", 0.0), name, step)
            for name, step, numbers in self.pictures(scene)
            if step >= self.parameters.after
        ]
        share, name, step = max(found, default=(0.0, "", 0))
        if share <= self.parameters.share or not scene.ended:
            return []
        return [
            self.finding(
                scene,
                place=Place("input"),
                first_step=step,
                message=f"{share:.0%} of the attribution in the picture {name!r} lies outside the "
                "mask, so the model looks at something else than it should.",
                evidence={"share": share},
            )
        ]


class DisagreeParameters(RuleParameters):
    """Options of `attributions_disagree`."""

    correlation: Share = 0.1
    """Smallest rank correlation of two pictures that is not reported."""


class AttributionsDisagree(PictureRule):
    """Two methods that explain the same outputs differently."""

    name = "attributions_disagree"
    severity = "hint"
    certainty = 0.5
    definition = (
        "Two pictures of a probe explain the same outputs at the same places. At the newest "
        "record, the rank correlation (Spearman) of their magnitudes is below `correlation`, as a "
        "mean over the samples."
    )
    source = (
        "Krishna et al., The Disagreement Problem in Explainable Machine Learning (2022), which "
        "uses rank correlation as a measure. The threshold is our own."
    )
    advice = (
        "Trust neither picture before you have changed the input: cover what one of them marks, "
        "and check whether the output changes (`occlusion`, or an intervention). Gradients of a "
        "saturated output, for example, say little."
    )
    needs = "two pictures of a probe that explain the same outputs at the same places"
    Parameters = DisagreeParameters

    def usable(self, scene: Scene) -> bool:
        """Return whether any pictures were compared."""
        return any(record["pairs"] for record in self.records(scene).values())

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the two pictures that disagree most."""
        found = [
            (float(value), one, other, int(record["step"]))
            for record in self.records(scene).values()
            for one, other, value in record["pairs"]
        ]
        value, one, other, step = min(found, default=(1.0, "", "", 0))
        if value >= self.parameters.correlation:
            return []
        return [
            self.finding(
                scene,
                place=Place("input"),
                first_step=step,
                message=f"The pictures {one!r} and {other!r} explain the same outputs, but the "
                f"rank correlation of their magnitudes is {value:.2f}.",
                evidence={"correlation": value},
            )
        ]


class GapParameters(RuleParameters):
    """Options of `completeness_gap`."""

    share: Fraction = 0.1
    """Smallest gap that is reported, relative to the change in the target."""


class CompletenessGap(PictureRule):
    """Integrated gradients with too few points."""

    name = "completeness_gap"
    severity = "hint"
    certainty = 0.9
    definition = (
        "The completeness gap of integrated gradients at the newest record, as a mean magnitude "
        "over the samples, exceeds `share` times the mean magnitude of the change in the target "
        "between baseline and input."
    )
    source = (
        "Sundararajan et al., Axiomatic Attribution for Deep Networks (2017), section 5: the sum "
        "should be within 5% of the change, or else the number of points be raised."
    )
    advice = "Raise `points`. If the gap stays, the model has jumps on the way from the baseline."
    needs = "a picture by `integrated_gradients`"
    Parameters = GapParameters

    def usable(self, scene: Scene) -> bool:
        """Return whether a picture has a gap."""
        return any("gap" in numbers for _, _, numbers in self.pictures(scene))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first picture with a large gap."""
        for name, step, numbers in self.pictures(scene):
            gap, difference = numbers.get("gap", 0.0), numbers.get("difference", 0.0)
            if gap > self.parameters.share * difference:
                return [
                    self.finding(
                        scene,
                        place=Place("input"),
                        first_step=step,
                        message=f"The sum of the picture {name!r} differs from the change in the "
                        f"target by {gap:.2g} on average, where the change is {difference:.2g}.",
                        evidence={"gap": gap, "difference": difference},
                    )
                ]
        return []
