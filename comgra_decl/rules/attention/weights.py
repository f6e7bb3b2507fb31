"""Softmax weights that run over the wrong axis, over a single value, or despite a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule, Finding, Place, Rule, Scene, calls_missing

_EFFECT = 0.2  # share of the weight that hidden positions would have without a mask
_FEWEST = 0.02  # share of positions that are hidden


class SoftmaxAxis(Rule):
    """Attention whose softmax runs over the queries instead of the keys."""

    name = "softmax_axis"
    severity = "error"
    certainty = 0.85
    definition = (
        "The result of a softmax over one of the last two dimensions, both of the same size, or "
        "over the dimension before them (the heads), "
        "enters a matrix product (matmul, bmm, `@` or einsum) that sums over the other of the two. "
        "Or a softmax over the samples of a batch enters a product that sums over another "
        "dimension. The weights in each sum then do not add up to 1. The rule checks neither "
        "weights of other shapes, such as assignments of points to clusters, nor weights that are "
        "normalized again."
    )
    source = (
        "Vaswani et al., Attention Is All You Need (2017), equation 1: the softmax returns the "
        "weights for the values over which the product sums. Our own definition."
    )
    advice = (
        "Compute the softmax over the dimension that the matrix product sums over: dim=-1 for "
        "`weights @ values`."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such product."""
        infos = scene.table.infos
        batches = {i.shape[0] for i in infos if i.kind == "input" and i.batch_dim == 0 and i.shape}
        for fact in scene.told("weighs"):
            if _is_wrong(fact) or _is_over_batch(fact, batches):
                shape = [*fact["shape"]]
                return [
                    self.finding(
                        scene,
                        place=Place(str(fact.get("where") or "softmax")),
                        first_step=0,
                        message=f"The softmax of the weights {shape} runs over dimension "
                        f"{fact['dim']}, but the product in {fact['where']} sums over dimension "
                        f"{fact['summed'][0]}: the attention weights of a query do not add up "
                        "to 1.",
                        evidence={"dim": int(fact["dim"]), "shape": str(shape)},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


def _is_wrong(fact: dict[str, Any]) -> bool:
    shape, dim, summed = [*fact["shape"]], int(fact["dim"]), [*fact["summed"]]
    last = {len(shape) - 1, len(shape) - 2}
    square = len(shape) > 2 and shape[-1] == shape[-2] > 1
    heads = len(shape) - 3 if len(shape) > 3 else -1
    return square and dim in last | {heads} and dim not in summed and len({*summed} & last) == 1


def _is_over_batch(fact: dict[str, Any], batches: set[int]) -> bool:
    """Return whether a softmax over the samples weighs something that each sample sums up."""
    shape, summed = [*fact["shape"]], [*fact["summed"]]
    return (
        int(fact["dim"]) == 0
        and 0 not in summed
        and len(shape) > 1
        and shape[0] in batches
        and shape[0] != shape[1]
    )


class UnscaledAttention(FactRule):
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
    kind = "unscaled"
    shown = ("shape",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} applies a softmax to scores of shape {fact['shape']} that are not "
            "divided by the root of their width: attention becomes sharper the wider the heads are."
        )


class InvertedMask(FactRule):
    """Masks that hide the tokens and show the padding."""

    name = "inverted_mask"
    severity = "error"
    certainty = 0.9
    definition = (
        "In the first records, a mask sets scores below -10000 (`masked_fill`, `where`, "
        "`key_padding_mask`, `attn_mask`) exactly where the integer input of the model is not "
        "padding. Padding is a token that ends several samples in runs of different lengths and "
        "occurs nowhere else."
    )
    source = (
        "PyTorch's documentation: True in a `key_padding_mask` and in `masked_fill` means hidden, "
        "True in the mask of scaled_dot_product_attention means visible."
    )
    advice = "Invert the mask: scores.masked_fill(tokens == pad, -inf)."
    kind = "inverted mask"
    shown = ("shape",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"The mask of shape {fact['shape']} in {fact['where']} is inverted: it hides all "
            "tokens from attention and shows only the padding."
        )


class IneffectiveMask(Rule):
    """Masks that hide nothing from a softmax, because they set scores to 0."""

    name = "ineffective_mask"
    certainty = 0.8
    definition = (
        "A mask sets at least "
        f"{_FEWEST:.0%} of the scores of a softmax to a number (`masked_fill`, `where`, or a "
        "product with zeros and ones), and these positions receive at least "
        f"{_EFFECT:.0%} of the weight that they would have if all positions were equal. Not "
        "reported if the result of the softmax is masked as well."
    )
    source = (
        "Velickovic et al., Graph Attention Networks (2018), section 2.1: masked attention "
        "computes scores only for neighbours. exp(0) is 1, so a score of 0 is an average score. "
        "Our own definition."
    )
    explained_by = ("inverted_mask",)
    advice = (
        "Fill masked scores with -inf (or the smallest number of the dtype) before the softmax."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first mask that has no effect."""
        for fact in scene.told("mask"):
            if fact.get("masked again"):
                continue
            hidden, weight = float(fact["hidden"]), float(fact["weight"])
            if hidden >= _FEWEST and weight >= _EFFECT * hidden:
                return [
                    self.finding(
                        scene,
                        place=Place(str(fact.get("where") or "softmax")),
                        first_step=0,
                        message=f"A mask sets {100 * hidden:.3g}% of the scores to "
                        f"{float(fact['fill']):.3g} before the softmax in {fact['where']}, but "
                        f"these positions still receive {100 * weight:.3g}% of the attention.",
                        evidence={"hidden": hidden, "weight": weight, "fill": fact["fill"]},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)


class SingleWeight(Rule):
    """A softmax over a dimension of size 1, which always returns 1."""

    name = "single_weight"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the first records, a softmax runs over a dimension of size 1, although a dimension "
        "other than the first is larger, as in scores of shape [batch, positions, 1]."
    )
    source = "exp(x) / exp(x) is 1 for every x. Our own definition."
    advice = (
        "Compute the softmax over the dimension that should be weighted, such as dim=1 for scores "
        "of shape [batch, positions, 1]."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such softmax."""
        for fact in scene.told("single"):
            shape = [*fact["shape"]]
            return [
                self.finding(
                    scene,
                    place=Place(str(fact.get("where") or "softmax")),
                    first_step=0,
                    message=f"A softmax over dimension {fact['dim']} of {shape} in "
                    f"{fact['where']} returns 1 everywhere, because this dimension has size 1.",
                    evidence={"dim": int(fact["dim"]), "shape": str(shape)},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)
