"""Attention without a useful pattern: all of it on one token, or from each token to itself."""

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
"""Minimum number of tokens for which attention is checked."""


def could_be_attention(info: SlotInfo) -> bool:
    """Return whether a tensor may be attention [..., queries, tokens], judging by its shape."""
    return len(info.shape) >= 3


def tokens_of(info: SlotInfo) -> float:
    """Return the number of tokens that a query can attend to; NaN if this is not attention."""
    *_, queries, tokens = (0, 0, *info.shape)
    return tokens if len(info.shape) >= 3 and tokens >= FEWEST_TOKENS and queries > 1 else nan


class AttentionParameters(Patient):
    """Options of `attention_collapse`."""

    tokens: Factor = 1.1
    """Smallest number of tokens over which attention must be spread on average."""


class AttentionCollapse(SlotRule):
    """Attention that is concentrated on one token per query."""

    name = "attention_collapse"
    certainty = 0.7
    definition = (
        "For `patience` records in a row, attention is spread over fewer than `tokens` tokens. "
        "The number of tokens is computed as 1 / E[sum p^2], where the expectation is over all "
        "rows of probabilities p. A tensor is treated as attention if it has at least three "
        f"dimensions and {FEWEST_TOKENS} tokens and all its elements are in [0, 1]. Its mean must "
        "also be consistent with rows that sum to 1."
    )
    source = (
        "Entropy collapse: Zhai et al., Stabilizing Transformer Training (2023). The rule uses the "
        "inverse participation ratio instead of the entropy because it can be computed from the l2 "
        "norm. msprobe monitors the largest probability."
    )
    advice = (
        "The logits are too large. Scale them by 1 / sqrt(d), normalize queries and keys (QK "
        "norm), lower the learning rate or use a warmup, and check the mask."
    )
    explained_by = ("nonfinite", "large_update")
    Parameters = AttentionParameters
    of_state = True
    statistics = ("l2", "mean", "min", "max")
    lowest, evidence = True, "tokens"
    needs = "attention probabilities, as in the `attention` preset"

    _seen = False

    def wants(self, table: SlotTable) -> Mask:
        """Return tensors that may contain attention, judging by their shape."""
        return table.outputs & table.where(could_be_attention)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the number of tokens over which rows are spread."""
        tokens = window.of_shape(tokens_of, at)
        rows = window.elements(at) / tokens
        valid = (window.read("min", at) >= -1e-6) & (window.read("max", at) <= 1 + 1e-3)
        valid &= np.abs(window.read("mean", at) * tokens - 1) < 1e-2
        spread = rows / window.read("l2", at).astype(np.float64) ** 2
        spread = np.where(valid, spread, np.nan)
        self._seen = self._seen or bool(valid.any())
        return spread < self.parameters.tokens, spread

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        nothing = None if self._seen else f"no attention is recorded; it needs {self.needs}"
        return super().missing(scene) or nothing

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is spread over {self.streak.worst[slot]:.2f} tokens, so "
            "attention has collapsed."
        )


class PatternParameters(SampledParameters):
    """Options of the rules about attention patterns."""

    share: Fraction = 0.9
    """Largest allowed share of all attention."""


class _Pattern(SampledRule):
    """A rule that reads attention values and measures the share of a pattern."""

    severity = "hint"
    certainty = 0.5
    explained_by = ("nonfinite",)
    Parameters = PatternParameters
    of_state = True
    evidence, what = "share of attention", "attention"
    needs = "attention with `values: true`, as in the `attention` preset"

    def wants(self, table: SlotTable) -> Mask:
        """Return tensors that may contain attention, judging by their shape."""
        return table.outputs & table.where(could_be_attention)

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Return whether all rows of the values [samples, ..., queries, tokens] sum to 1."""
        if values.ndim < 3 or values.shape[-1] < FEWEST_TOKENS or values.shape[-2] < 2:
            return False
        sums = np.asarray(values, np.float64).sum(-1)
        return bool((values >= 0).all() and np.abs(sums - 1).max() < 1e-2)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the share of attention that follows the pattern in each record."""
        share = np.full((len(window), len(at)), np.nan)
        for row, column, values in self.measured(window, at):
            share[row, column] = self.share_of(values)
        return share > self.parameters.share, share

    @staticmethod
    @abstractmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Return the share of attention [samples, ..., queries, tokens] with the pattern."""


class AttentionSink(_Pattern):
    """Attention that always goes to the same token."""

    name = "attention_sink"
    definition = (
        "For `patience` checked records in a row, more than `share` of the attention of all "
        "queries, heads and recorded samples is on the same token. This can be the first token "
        "or any other."
    )
    source = (
        "Attention sinks: Xiao et al., Efficient Streaming Language Models (2024), who find more "
        "than half of the attention on the first token in most heads. The vertical stripe in the "
        "book chapter 'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "A single head behaves like this when it has nothing to contribute. If all heads do, "
        "every token receives the same value. Check whether the mask allows attention to other "
        "tokens. If the logits grow, normalize queries and keys, or lower the learning rate."
    )

    @staticmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Return the share of the token that receives the most attention."""
        by_token = attention.reshape(-1, attention.shape[-1]).mean(0)
        return float(by_token.max())

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{self.streak.worst[slot]:.0%} of {scene.table.place(slot)} goes to the same token "
            "for every query."
        )


class AttentionDiagonal(_Pattern):
    """Attention from each token to itself."""

    name = "attention_diagonal"
    definition = (
        "For `patience` checked records in a row, more than `share` of the attention of all "
        "queries, heads and recorded samples is on the diagonal. The rule applies only if there "
        "are as many queries as tokens."
    )
    source = (
        "The diagonal pattern in the book chapter 'Debugging: Visualizing Activation Maps & "
        "Gradients'. The default was chosen for this rule."
    )
    advice = (
        "A layer in which tokens attend only to themselves passes its input on unchanged. Check "
        "whether the mask is inverted, whether the softmax uses the right dimension, and whether "
        "queries and keys use the same projection."
    )

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Return whether the values are self-attention."""
        return values.shape[-2:-1] == values.shape[-1:] and super().is_meant(values)

    @staticmethod
    def share_of(attention: NDArray[np.float64]) -> float:
        """Return the mean of the diagonal."""
        return float(np.diagonal(attention, axis1=-2, axis2=-1).mean())

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"In {scene.table.place(slot)}, {self.streak.worst[slot]:.0%} of the attention goes "
            "from tokens to themselves: the layer passes its input on unchanged."
        )
