"""Attention as matrices, as lines between tokens, and as an overview of all layers and heads."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class AttentionView(Component):
    """Draws attention weights in three ways, between which the browser switches.

    The head view and the model view follow BertViz (Vig 2019, "A Multiscale Visualization of
    Attention in the Transformer Model").

    Message: `{"layer": index}`, a click on a layer in the overview.

    Attributes:
        shown: `{"name": str, "facts": str, "heads": int, "queries": [str], "keys": [str],
            "weights": base64 of uint8 [heads, queries, keys], "largest": [number per head]}`. 255
            stands for the largest weight of the head.
        layers: `[{"name": str, "heads": int, "rows": int, "columns": int, "weights": base64}]`, the
            thumbnails of all layers, in execution order.
        chosen: Index of the shown layer.
        missing: Why there is nothing to show, or "".
    """

    shown = param.Dict(default=None, allow_None=True)
    layers = param.List(default=[])
    chosen = param.Integer(default=-1)
    missing = param.String(default="")

    _esm = source("shared.js", "attention.js")
    _stylesheets: ClassVar[list[str]] = [source("attention.css")]

    def check(self, message: Message) -> bool:
        """Return whether the message names a layer."""
        ((action, value),) = message.items()
        known = isinstance(value, int) and not isinstance(value, bool)
        return action == "layer" and known and 0 <= value < len(self.layers)
