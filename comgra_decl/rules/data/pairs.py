"""Target maps that do not match their inputs: mirrored, or from another sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Field,
    Finding,
    Fraction,
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

_MOST = 200  # samples compared
_KINDS = {
    "mirrored": "this target mirrored horizontally",
    "upside down": "this target mirrored vertically",
    "rotated": "this target rotated by 180 degrees",
    "other": "that of another sample",
}

Map = NDArray[np.float64]


class PairParameters(RuleParameters):
    """Options of `misaligned_pairs`."""

    correlation: Fraction = 0.5
    """Smallest correlation of an input with the map that fits it."""

    margin: Fraction = 0.3
    """Smallest amount by which that correlation exceeds the one with its own target."""

    share: Annotated[Fraction, Field(ge=0.05)] = 0.15
    """Smallest share of the compared samples that fit another map."""

    least: Count = 10
    """Number of misfits required."""


class MisalignedPairs(Rule):
    """Target maps that do not match their inputs: mirrored, or from another sample."""

    name = "misaligned_pairs"
    certainty = 0.75
    definition = (
        "The input is a map [batch, channels, height, width], and the target is a map of the same "
        "height and width. A sample fits a map if one of its channels has an absolute correlation "
        "of at least `correlation` with it that exceeds, by `margin`, the correlation with its own "
        "target. The maps tried are the sample's own target mirrored horizontally, vertically or "
        "both, and the targets of the other recorded samples. At least `least` samples, and at "
        "least `share` of all compared samples, fit the same kind of map, and at least three times "
        "as many as fit any other kind. Samples whose own target fits at least as well are not "
        "counted as misfits, so symmetric targets are never misfits."
    )
    source = (
        "Augmentation must change an input and its target map in the same way; see "
        "torchvision.transforms.v2, which transforms both together. Our own definition."
    )
    advice = (
        "Apply random flips, crops and permutations to inputs and targets with the same random "
        "numbers, and index both with the same indices."
    )
    Parameters = PairParameters

    _votes: dict[tuple[int, int], dict[str, int]] = per_run(dict)
    _first: dict[tuple[int, int], int] = per_run(dict)
    _compared: dict[tuple[int, int], int] = per_run(dict)

    def look(self, window: Window) -> None:
        """Compare inputs with their targets."""
        infos = window.table.infos
        pairs = [
            (a, b)
            for a in input_slots(window.table).tolist()
            for b in target_slots(window.table).tolist()
            if len(infos[a].shape) == 4
            and "float" in infos[a].dtype
            and infos[a].batch_dim == infos[b].batch_dim == 0
            and len(infos[b].shape) in (3, 4)
            and infos[a].shape[-2:] == infos[b].shape[-2:]
            and infos[a].shape[0] == infos[b].shape[0]
            and self._compared.get((a, b), 0) < _MOST
        ]
        for row in read_rows(window).tolist() if pairs else ():
            for pair in pairs:
                x, y = (values_of(window, row, slot) for slot in pair)
                if x is not None and y is not None and len(x) == len(y):
                    self._compare(pair, int(window.steps[row]), x, y)

    def _compare(self, pair: tuple[int, int], step: int, x: Map, y: Map) -> None:
        y = y if y.ndim == 3 else y.mean(1) if y.shape[1] > 1 else y[:, 0]
        votes = self._votes.setdefault(pair, {})
        maps = _normal(y)
        for sample, channels in enumerate(_normal(x)):
            if self._compared.get(pair, 0) >= _MOST:
                return
            if not np.isfinite(maps[sample]).all() or not np.isfinite(channels).all():
                continue  # constant
            kind, fit = max(_fits(channels, maps, sample), key=lambda entry: entry[1])
            own = _fit(channels, maps[sample])
            self._compared[pair] = self._compared.get(pair, 0) + 1
            if fit >= self.parameters.correlation and fit - own >= self.parameters.margin:
                votes[kind] = votes.get(kind, 0) + 1
                self._first.setdefault(pair, step)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first pair of tensors that do not match."""
        for pair, votes in self._votes.items():
            if not votes:
                continue
            kind = max(votes, key=lambda name: votes[name])
            count, compared = votes[kind], self._compared[pair]
            others = max((n for name, n in votes.items() if name != kind), default=0)
            enough = count >= max(self.parameters.least, self.parameters.share * compared)
            if enough and count >= 3 * others:
                source, goal = (scene.table.place(slot) for slot in pair)
                return [
                    self.finding(
                        scene,
                        place=goal,
                        first_step=self._first[pair],
                        message=f"{count} of {compared} recorded samples of {source} do not match "
                        f"their target ({goal}) but do match {_KINDS[kind]}.",
                        evidence={"misfits": count, "samples": compared},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._compared:
            return None
        return "the values of input maps and target maps of the same size are not recorded"


def _fits(channels: Map, maps: Map, sample: int) -> Iterator[tuple[str, float]]:
    own = maps[sample]
    yield "mirrored", _fit(channels, own[:, ::-1])
    yield "upside down", _fit(channels, own[::-1])
    yield "rotated", _fit(channels, own[::-1, ::-1])
    for other in range(len(maps)):
        if other != sample and np.isfinite(maps[other]).all():
            yield "other", _fit(channels, maps[other])


def _normal(maps: Map) -> Map:
    """Return maps with a mean of 0 and an l2 norm of 1; NaN where a map is constant."""
    centred = maps - maps.mean((-2, -1), keepdims=True)
    with np.errstate(all="ignore"):
        return np.asarray(centred / np.sqrt((centred**2).sum((-2, -1), keepdims=True)))


def _fit(channels: Map, target: Map) -> float:
    return float(np.abs((channels * target).sum((-2, -1))).max())
