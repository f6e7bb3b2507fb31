"""Concatenations of a tensor with itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comgra_decl.rules.api import FactRule, Scene

_FEW = 4  # channels; images of one channel are repeated for networks that expect three


class ConcatenatedWithItself(FactRule):
    """Concatenations of a tensor with itself, where another tensor was probably intended."""

    name = "concatenated_with_itself"
    certainty = 0.75
    definition = (
        "Within a model, `cat` joins a tensor with a gradient only with itself, along a dimension "
        f"other than the batch with at least {_FEW} elements. The copies add nothing that the next "
        "layer could not compute from one of them. Fewer elements are ignored, because gray images "
        "are repeated for networks that expect three channels."
    )
    source = (
        "Ronneberger et al., U-Net (2015): the decoder concatenates its upsampled map with the "
        "encoder's map of the same size. Our own definition."
    )
    advice = (
        "Pass the tensor that is missing, such as the encoder's output in a skip connection: "
        "`torch.cat([x, skip], 1)`."
    )
    kind = "doubled"
    shown = ("shape", "count")

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return concatenations along dimensions with several elements."""
        found = super().chosen(scene)
        return [f for f in found if f["dim"] > 0 and f["shape"][f["dim"]] >= _FEW]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} concatenates a tensor of shape {fact['shape']} with itself: another "
            "tensor, such as a skip connection, was probably intended and is not used."
        )
