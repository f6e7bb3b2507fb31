"""Images that were turned without their masks."""

from __future__ import annotations

from collections import Counter

from comgra_decl.rules.api import Count, Finding, Place, Rule, RuleParameters, Scene

_SOME = 0.15  # share of the samples


class FlipParameters(RuleParameters):
    """Options of `unmatched_flip`."""

    least: Count = 20
    """Number of samples required whose image is clearly related to one position of its mask."""


class UnmatchedFlip(Rule):
    """Images that are flipped or turned without their masks."""

    name = "unmatched_flip"
    certainty = 0.8
    definition = (
        "An input consists of images and a target of maps (masks, heat maps) at least 8 cells wide "
        "and high and not larger than the images. In the first records, up to 64 samples each, the "
        "images (one channel) are correlated with their maps (one channel, or where they have one "
        "class), as they are and flipped, rotated by 180 degrees or (if square) transposed; both "
        "are averaged to at most 32 x 32 cells. A sample counts if the largest of these "
        "correlations is at least 0.4 and 1.5 times as large as the one without a turn (or, "
        "without a turn, as all others). Of at least `least` such samples, at least "
        f"{_SOME:.0%} fit a turned target. Unless as many fit it as it is, or turned in another "
        "way, the finding is only a hint, because turning images may be the task."
    )
    source = "Random augmentations of images and masks must be drawn once. Our own definition."
    advice = (
        "Draw the augmentation once and apply it to the image and to its mask (in "
        "torchvision.transforms.v2, pass both in one call, with the mask as a tv_tensors.Mask)."
    )
    Parameters = FlipParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first target that does not follow its images."""
        aligned: Counter[int] = Counter()
        positions: dict[int, Counter[str]] = {}
        for fact in scene.told("turned"):
            aligned[fact["target"]] += fact["aligned"]
            positions.setdefault(fact["target"], Counter()).update(fact["turned"])
        for number, names in positions.items():
            turned, fits = names.total(), aligned[number]
            total = turned + fits
            if total < self.parameters.least or turned < _SOME * total:
                continue
            how = names.most_common(1)[0][0]
            # a task turns all images alike
            mixed = sum(n >= _SOME * total for n in (fits, *names.values())) > 1
            return [
                self.finding(
                    scene,
                    place=Place("target", "target", number),
                    first_step=0,
                    severity="error" if mixed else "hint",
                    message=f"{turned} of {total} images fit their target only if it is turned "
                    f"(most often {how}), and {fits} fit it as it is."
                    + (" Images are augmented without their masks." if mixed else ""),
                    evidence={"turned": turned, "aligned": fits, "samples": total},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if scene.told("turned"):
            return None
        return "no input consists of images with a target map of at most the same size"
