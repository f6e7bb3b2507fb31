"""Views used where a permutation of dimensions was intended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from operator import mul
from typing import Any

from comgra_decl.rules.api import Finding, Place, Rule, Scene, calls_missing


class ViewForPermute(Rule):
    """Views used where a permutation of dimensions was intended."""

    name = "view_for_permute"
    certainty = 0.8
    definition = (
        "`view` or `reshape` gives a tensor a shape in which a dimension of the same size is in "
        "another position, such as [batch, height, width, 3] as [batch, 3, height, width], or "
        "[batch, positions, heads * size] as [batch, heads, positions, size]. A view does not move "
        "elements, so the values of different positions are mixed. Dimensions of size 1 are "
        "ignored, and shapes are compared between common boundaries. A view may also not exchange "
        "channels for height and width, such as [batch, 4 * channels, height, width] as [batch, "
        "channels, 2 * height, 2 * width]: it cuts maps into rows instead of interleaving their "
        "pixels. If one of two swapped dimensions is a multiple of the other, the view may also "
        "merge neighbouring dimensions. Such a case is only a hint, and it is not reported if one "
        "of the two is the batch or twice as large as the other. The last two dimensions are not "
        "reported if they differ by 1, because such a view cuts off a diagonal or shifts rows. "
        "Results of `cat` and `pad` are ignored, because a view of a padded tensor shifts its rows "
        "(relative positions). The rule also reports inputs [batch, 3 or 4 channels, height, "
        "width] in which the mean squared difference of elements along the width is less than half "
        "as large at a distance of one per channel as between neighbours."
    )
    source = (
        "PyTorch's documentation of `Tensor.view`: the new shape must keep the order of elements. "
        "Our own definition."
    )
    advice = (
        "Use `permute` or `transpose` to reorder dimensions, and `reshape` only to split or merge "
        "neighbouring ones. For heads: `x.view(B, T, H, D).transpose(1, 2)`. To exchange channels "
        "for height and width, use `F.pixel_shuffle` or `F.pixel_unshuffle`."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such view, preferring one that is certain."""
        found: list[tuple[bool, int, bool, dict[str, Any]]] = []
        batches = {i.shape[i.batch_dim] for i in scene.table.infos if i.batch_dim is not None}
        for fact in scene.told("reshape"):
            sure = moved(fact["source"], fact["target"], batches=batches)
            if sure is not None:
                found.append((not sure, len(found), sure, fact))
        if not found:
            return self._of_images(scene)
        _, _, sure, fact = min(found, key=lambda entry: entry[:2])
        return [
            self.finding(
                scene,
                place=Place(str(fact.get("where") or "view")),
                first_step=0,
                message=f"A view of shape {fact['source']} as {fact['target']} in {fact['where']} "
                "mixes positions: it reorders the dimensions but not the elements. "
                + (
                    "A pixel shuffle was probably intended."
                    if _is_shuffle(fact["source"], fact["target"])
                    else "A permute or transpose was probably intended."
                ),
                severity="warning" if sure else "hint",
                certainty=self.certainty if sure else 0.5,
                evidence={"from": str(fact["source"]), "to": str(fact["target"])},
                also=len({f["where"] for _, _, _, f in found}) - 1,
            )
        ]

    def _of_images(self, scene: Scene) -> list[Finding]:
        """Judge inputs that were viewed before they reached the model."""
        for fact in scene.told("interleaved")[:1]:
            _, channels, height, width = fact["shape"]
            return [
                self.finding(
                    scene,
                    place=Place("input", str(fact["input"])),
                    first_step=0,
                    message=f"The images in {fact['input']}, of shape {fact['shape']}, have their "
                    f"colours side by side: elements {channels} apart are more alike than "
                    f"neighbours. Images [{height}, {width}, {channels}] were probably viewed as "
                    f"[{channels}, {height}, {width}] instead of permuted.",
                    evidence={"ratio": float(fact["ratio"])},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


def moved(
    source: Sequence[int], target: Sequence[int], *, batches: AbstractSet[int] = frozenset()
) -> bool | None:
    """Return whether a view moves a dimension: True, False if in doubt, and None if not.

    Args:
        source: the shape before.
        target: the shape after.
        batches: sizes of batches; a doubtful move of such a dimension does not count.
    """
    if _is_shuffle(source, target):
        return True
    if _is_shift(source, target):
        return None
    found = [_of_group(*group, batches) for group in _groups(source, target)]
    doubts = [each for each in found if each is not None]
    return max(doubts) if doubts else None


def _is_shift(source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a view changes [..., n - 1, n] to [..., n, n - 1], or the reverse."""
    swapped = [*source[:-2], *reversed(source[-2:])]
    return len(source) > 1 and swapped == [*target] and abs(source[-2] - source[-1]) == 1


def _is_shuffle(source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a view changes [..., c * r * r, h, w] to [..., c, h * r, w * r], or the reverse."""
    if len(source) != len(target) or len(source) < 4 or source[:-3] != target[:-3]:
        return False
    one, two = sorted((tuple(source[-3:]), tuple(target[-3:])), key=lambda shape: shape[1])
    rise = two[1] // one[1] if one[1] else 1
    return rise > 1 and two == (one[0] // rise**2, one[1] * rise, one[2] * rise) and one[1] > 1


Group = tuple[list[int], list[int]]
"""Dimensions before and after."""


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[Group]:
    """Yield the dimensions between common boundaries, within which a view splits and merges."""
    one, two = [n for n in source if n > 1], [n for n in target if n > 1]
    ends, others = [*accumulate(one, mul)], [*accumulate(two, mul)]
    at = other = 0
    for end in ends:
        if end in others:
            then, after = ends.index(end) + 1, others.index(end) + 1
            if then - at > 1 and after - other > 1:
                yield one[at:then], two[other:after]
            at, other = then, after


def _of_group(one: list[int], two: list[int], batches: AbstractSet[int]) -> bool | None:
    if sorted(one) == sorted(two):
        low, high = sorted(one)[:2]
        if len(one) > 2 or high % low:
            return True
        if high == 2 * low:  # halves, or a shift by relative positions
            return None
        return None if batches & {low, high} else False
    for few, many in ((one, two), (two, one)):  # heads, split and merged
        if len(few) == 2 and len(many) == 3 and few[0] == many[1] != many[0]:
            return True
        # tokens [height * width, channels] and a square map [channels, height, width]
        if len(few) == 2 and len(many) == 3 and few[1] == many[0] != few[0] == many[2] ** 2:
            return True
    return None
