"""Attention as matrices, as lines between tokens, and as an overview of all layers and heads."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class AttentionView(Component):
    """Draws attention weights in three ways, between which the browser switches.

    The head view and the model view follow BertViz (Vig 2019, "A Multiscale Visualization of
    Attention in the Transformer Model").

    Messages: `{"layer": index}`, a click on a layer in the overview; `{"neurons": head}`, the head
    whose queries and keys are shown, or -1 if none are.

    Attributes:
        shown: `{"name": str, "facts": str, "heads": int, "queries": [str], "keys": [str],
            "weights": base64 of uint8 [heads, queries, keys], "largest": [number per head]}`. 255
            stands for the largest weight of the head.
        layers: `[{"name": str, "heads": int, "rows": int, "columns": int, "weights": base64}]`, the
            thumbnails of all layers, in execution order.
        neural: Whether queries and keys were recorded.
        neurons: `{"head": int, "width": int, "query": base64 of float32 [queries, width],
            "key": base64 of float32 [keys, width], "weights": base64 of float32 [queries, keys]}`,
            or None if they are not shown.
        chosen: Index of the shown layer.
        missing: Why there is nothing to show, or "".
    """

    shown = param.Dict(default=None, allow_None=True)
    layers = param.List(default=[])
    chosen = param.Integer(default=-1)
    neural = param.Boolean(default=False)
    neurons = param.Dict(default=None, allow_None=True)
    missing = param.String(default="")

    _esm = source("shared.js", "attention.js")
    _stylesheets: ClassVar[list[str]] = [source("attention.css")]

    def check(self, message: Message) -> bool:
        """Return whether the message names a layer or a head."""
        ((action, value),) = message.items()
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        if action == "neurons":
            heads: int = (self.shown or {}).get("heads", 0)
            return -1 <= value < heads
        return action == "layer" and 0 <= value < len(self.layers)
