"""Images that were turned without their masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Finding,
    Rule,
    RuleParameters,
    Scene,
    Window,
    input_slots,
    per_run,
    read_rows,
    target_slots,
    values_of,
)

Floats = NDArray[np.float64]

_RELATED = 0.4  # least correlation of an image with its mask
_CLEARLY = 1.5  # how many times the correlation with any other position
_SOME = 0.15  # share of the samples
_SMALLEST = 8  # height and width
_CHANNELS, _CLASSES = 4, 8


_TRANSPOSED = "transposed"
_TURNS: dict[str, Callable[[Floats], Floats]] = {
    "flipped from left to right": lambda mask: mask[..., ::-1],
    "flipped upside down": lambda mask: mask[..., ::-1, :],
    "rotated by 180 degrees": lambda mask: mask[..., ::-1, ::-1],
    _TRANSPOSED: lambda mask: mask.swapaxes(-1, -2),  # of square images
}


@dataclass
class _Seen:
    """How many samples fit their mask as it is, and how many fit a turned one."""

    step: int
    aligned: int = 0
    turned: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TURNS, 0))


class FlipParameters(RuleParameters):
    """Options of `unmatched_flip`."""

    least: Count = 20
    """Number of samples required whose image is clearly related to one position of its mask."""


class UnmatchedFlip(Rule):
    """Images that are flipped or turned without their masks."""

    name = "unmatched_flip"
    certainty = 0.8
    definition = (
        "An input and a target are images of the same height and width (at least "
        f"{_SMALLEST} each). For each recorded sample, the pixels of the input (of one channel) "
        "are correlated with those of the target (one channel, or where it has one class), as it "
        "is and flipped, rotated by 180 degrees or (if square) transposed. A sample counts if the "
        f"largest of these correlations is at least {_RELATED} and {_CLEARLY} times as large as "
        "the one without a turn (or, without a turn, as all others). Of at least `least` such "
        f"samples, at least {_SOME:.0%} fit a turned target and as many fit it as it is. If hardly "
        "any sample fits as it is, the rule gives a hint, because turning images may be the task."
    )
    source = "Random augmentations of images and masks must be drawn once. Our own definition."
    advice = (
        "Draw the augmentation once and apply it to the image and to its mask (in "
        "torchvision.transforms.v2, pass both in one call, with the mask as a tv_tensors.Mask)."
    )
    Parameters = FlipParameters

    _seen: dict[tuple[int, int], _Seen] = per_run(dict)

    def look(self, window: Window) -> None:
        """Compare images with their masks, as they are and turned."""
        table = window.table
        sources, goals = input_slots(table).tolist(), target_slots(table).tolist()
        for row in read_rows(window).tolist() if sources and goals else ():
            for source in sources:
                x = values_of(window, row, source)
                if x is None or x.ndim != 4 or min(x.shape[-2:]) < _SMALLEST:
                    continue
                for goal in goals:
                    y = values_of(window, row, goal)
                    if y is None or y.ndim not in (3, 4) or len(y) != len(x):
                        continue
                    if y.shape[-2:] == x.shape[-2:]:
                        seen = _Seen(int(window.steps[row]))
                        self._count(self._seen.setdefault((source, goal), seen), x, y)

    def _count(self, seen: _Seen, x: Floats, y: Floats) -> None:
        for image, mask in zip(x, y, strict=True):
            parts = _parts(mask)
            own = _related(image, parts)
            square = mask.shape[-1] == mask.shape[-2]
            turns = [name for name in _TURNS if square or name != _TRANSPOSED]
            turned = {name: _related(image, _TURNS[name](parts)) for name in turns}
            best = max(turned, key=lambda name: turned[name])
            if own >= _RELATED and own >= _CLEARLY * turned[best]:
                seen.aligned += 1
            elif turned[best] >= _RELATED and turned[best] >= _CLEARLY * own:
                seen.turned[best] += 1

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first image whose masks do not follow it."""
        for (source, goal), seen in self._seen.items():
            turned = sum(seen.turned.values())
            total = turned + seen.aligned
            if total < self.parameters.least or turned < _SOME * total:
                continue
            how = max(seen.turned, key=lambda name: seen.turned[name])
            mixed = seen.aligned >= _SOME * total
            place, target = scene.table.place(source), scene.table.place(goal)
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=seen.step,
                    severity="error" if mixed else "hint",
                    message=f"{turned} of {total} samples of {place} fit their target ({target}) "
                    f"only if it is turned (most often {how}), and {seen.aligned} fit it as it is. "
                    + ("Images are augmented without their masks." if mixed else ""),
                    evidence={"turned": turned, "aligned": seen.aligned, "samples": total},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._seen:
            return None
        return "no input and target of the same samples are images of the same size"


def _parts(mask: Floats) -> Floats:
    """Return a target's channels, or where each class is, [parts, height, width]."""
    if mask.ndim == 3:
        return mask[:_CLASSES]
    classes = np.unique(mask)
    whole = len(classes) <= _CLASSES and bool((classes == np.round(classes)).all())
    return np.stack([mask == each for each in classes]).astype(np.float64) if whole else mask[None]


def _related(image: Floats, parts: Floats) -> float:
    """Return the largest correlation of a channel of an image with a part of a target."""
    left = image[:_CHANNELS].reshape(min(len(image), _CHANNELS), -1)
    right = parts.reshape(len(parts), -1)
    left, right = left - left.mean(1, keepdims=True), right - right.mean(1, keepdims=True)
    sizes = np.sqrt((left**2).sum(1)[:, None] * (right**2).sum(1)[None])
    with np.errstate(all="ignore"):
        found = np.abs(left @ right.T) / sizes
    return float(np.nan_to_num(found).max(initial=0.0))
