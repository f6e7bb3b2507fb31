"""Attention whose pattern says that it does nothing: all on one token, or each on itself."""

from __future__ import annotations

from abc import abstractmethod
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Factor,
    Fraction,
    Mask,
    Measured,
    Patient,
    SampledParameters,
    SampledRule,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Window,
)

FEWEST_TOKENS = 4
"""Attention to fewer tokens has no pattern."""


def could_be_attention(info: SlotInfo) -> bool:
    """Whether a tensor could be attention [..., queries, tokens] in some record."""
    return len(info.shape) >= 3


def tokens_of(info: SlotInfo) -> float:
    """Returns the tokens that queries may look at; NaN if this can be no attention."""
    *_, queries, tokens = (0, 0, *info.shape)
    return tokens if len(info.shape) >= 3 and tokens >= FEWEST_TOKENS and queries > 1 else nan


class AttentionParameters(Patient):
    """What can be said of `attention_collapse`."""

    tokens: Factor = 1.1
    """An attention that is spread over fewer tokens than this looks at one only."""


class AttentionCollapse(SlotRule):
    """Attention that looks at one token only."""

    name = "attention_collapse"
    certainty = 0.7
    definition = (
        "The number of tokens that attention is spread over, 1 / E[sum p^2] over all rows of "
        "probabilities p, is below `tokens` for `patience` records. A tensor is attention if it "
        "has at least three dimensions, all its elements lie in 0 .. 1 and its mean is that of "
        "rows that sum to 1, of at least four tokens."
    )
    source = (
        "Entropy collapse: Zhai et al., Stabilizing Transformer Training (2023); the inverse "
        "participation ratio stands for the entropy, since it follows from the l2 norm; msprobe "
        "watches the largest probability."
    )
    advice = (
        "Logits have grown too large: scale them by 1 / sqrt(d), normalise queries and keys "
        "(QK norm), lower the learning rate, warm it up; check the mask."
    )
    explained_by = ("nonfinite", "large_update")
    Parameters = AttentionParameters
    statistics = ("l2", "mean", "min", "max")
    lowest, evidence = True, "tokens"
    needs = "attention probabilities, as the preset `attention` does"

    _seen = False

    def wants(self, table: SlotTable) -> Mask:
        """Returns what could be attention by its shape."""
        return table.outputs & table.where(could_be_attention)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Counts the tokens that rows are spread over."""
        tokens = window.of_shape(tokens_of, at)
        rows = window.elements(at) / tokens
        are = (window.read("min", at) >= -1e-6) & (window.read("max", at) <= 1 + 1e-3)
        are &= np.abs(window.read("mean", at) * tokens - 1) < 1e-2
        spread = rows / window.read("l2", at).astype(np.float64) ** 2
        spread = np.where(are, spread, np.nan)
        self._seen = self._seen or bool(are.any())
        return spread < self.parameters.tokens, spread

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        nothing = None if self._seen else f"no attention is recorded; add to `nodes`: {self.needs}"
        return super().missing(scene) or nothing

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how few tokens it looks at."""
        return (
            f"{scene.table.place(slot)} is spread over {self.streak.worst[slot]:.2f} tokens: "
            "attention has collapsed."
        )


class PatternParameters(SampledParameters):
    """What can be said of rules about patterns of attention."""

    share: Fraction = 0.9
    """So much of all attention is too much."""


class _Pattern(SampledRule):
    """Looks at the values of attention."""

    severity = "hint"
    certainty = 0.5
    explained_by = ("nonfinite",)
    Parameters = PatternParameters
    evidence, what = "share of attention", "attention"
    needs = "attention with `values: true`, as the preset `attention` does"

    def wants(self, table: SlotTable) -> Mask:
        """Returns what could be attention by its shape."""
        return table.outputs & table.where(could_be_attention)

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Whether rows of values [samples, ..., queries, tokens] are shares that add up to 1."""
        if values.ndim < 3 or values.shape[-1] < FEWEST_TOKENS or values.shape[-2] < 2:
            return False
        sums = np.asarray(values, np.float64).sum(-1)
        return bool((values >= 0).all() and np.abs(sums - 1).max() < 1e-2)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Looks at the values of each record."""
        share = np.full((len(window), len(at)), np.nan)
        for row, column, values in self.measured(window, at):
            share[row, column] = self.share_of(values)
        return share > self.parameters.share, share

    @staticmethod
    @abstractmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Returns how much of attention [samples, ..., queries, tokens] has the pattern."""


class AttentionSink(_Pattern):
    """Attention that goes to one and the same token from everywhere."""

    name = "attention_sink"
    definition = (
        "Of the attention of all queries, heads and recorded samples, more than `share` goes to "
        "the same token, the first one or another, for `patience` of the records looked at."
    )
    source = (
        "Attention sinks: Xiao et al., Efficient Streaming Language Models (2024), who find more "
        "than half of it at the first token in most heads; the debugging chapter's vertical stripe."
    )
    advice = (
        "Some heads do this when they have nothing to say; all of them hand on the same value "
        "to every token. See whether the mask lets anything else through, and look for logits that "
        "grow: normalise queries and keys, lower the learning rate."
    )

    @staticmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Returns the share of the token that gets most."""
        by_token = attention.reshape(-1, attention.shape[-1]).mean(0)
        return float(by_token.max())

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how much it is."""
        return (
            f"{self.streak.worst[slot]:.0%} of {scene.table.place(slot)} is at one token, wherever "
            "it looks from."
        )


class AttentionDiagonal(_Pattern):
    """Attention of each token to itself alone."""

    name = "attention_diagonal"
    definition = (
        "Of the attention of all queries, heads and recorded samples, from as many queries as "
        "there are tokens, more than `share` lies on the diagonal, for `patience` of the records "
        "looked at."
    )
    source = "The debugging chapter's diagonal pattern; own default."
    advice = (
        "Attention that looks at itself hands on its input: look at the mask (is it inverted?), at "
        "the dimension of the softmax, and at queries and keys, which may be the same projection."
    )

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Whether this is attention of tokens to themselves."""
        return values.shape[-2:-1] == values.shape[-1:] and super().is_meant(values)

    @staticmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Returns the mean of the diagonal."""
        return float(np.diagonal(attention, axis1=-2, axis2=-1).mean())

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how much it is."""
        return (
            f"{self.streak.worst[slot]:.0%} of {scene.table.place(slot)} is of tokens to "
            "themselves: it hands on what it is given."
        )
