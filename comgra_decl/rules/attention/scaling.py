"""Attention scores that are not scaled by the width of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule


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
