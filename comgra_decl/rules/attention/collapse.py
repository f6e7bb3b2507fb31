"""Attention that looks at one token only."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.rules.attention.patterns import could_be_attention, tokens_of
from comgra_decl.rules.base import Patient, Scene, SlotRule
from comgra_decl.rules.memory import Bools, Slots
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Window
from comgra_decl.spec.base import Number


class AttentionParameters(Patient):
    """What can be said of `attention_collapse`."""

    tokens: Annotated[Number, Field(gt=1)] = 1.1
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

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._seen = False

    def wants(self, table: SlotTable) -> Mask:
        """Returns what could be attention by its shape."""
        return table.outputs & table.where(could_be_attention)

    def measure(self, window: Window, at: Slots) -> tuple[Bools, NDArray[Any]]:
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
