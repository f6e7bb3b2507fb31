"""Attention weights of the selected layer and sample, and an overview of all layers."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import numpy as np

from comgra_decl.viewer.components.attention import AttentionView
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.model.attention import (
    Attention,
    Floats,
    attention,
    has_neurons,
    layer_at,
    layers,
    neurons,
    thumbnails,
)
from comgra_decl.viewer.model.runview import Slot
from comgra_decl.viewer.panes.base import TENSOR, Pane, Shown

_NONE = (
    "This run has no attention weights. They are recognized by their name or class, or by `axes: "
    "[head, query, key]` in the node's spec entry. Fused attention has no weights to record unless "
    "the spec selects them; see the `attention` preset."
)
_UNRECORDED = (
    "This layer has no weights at this step. Set `values: true` or `preview` in its spec "
    "entry, or choose another step or sample."
)


class AttentionPane(Pane):
    """The *Attention* section."""

    reads: ClassVar = TENSOR | {"step", "batch"}
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the drawing."""
        self.view = AttentionView(sizing_mode="stretch_width", margin=0)
        self.view.on_message(self._on_message)
        self._layers: list[Slot] = []
        self._head = -1
        return self.view

    def components(self) -> list[Any]:
        """Return the drawing, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Send the weights of the selected layer, and the thumbnails of all layers."""
        self._layers = layers(shown.view)
        slot = layer_at(shown.view, shown.at)
        if slot is None:
            empty = {"shown": None, "neural": False, "neurons": None}
            self.view.put(layers=[], chosen=-1, missing=_NONE, **empty)
            return
        every = [(each, attention(shown.view, each, shown.at)) for each in self._layers]
        found = next(weights for each, weights in every if each is slot)
        self.view.put(
            shown=None if found is None else _whole(slot, found),
            layers=[_small(each, weights) for each, weights in every],
            chosen=self._layers.index(slot),
            missing=_UNRECORDED if found is None else "",
            neural=has_neurons(shown.view, slot),
            neurons=None if found is None else self._neurons(shown, slot, found),
        )

    def _neurons(self, shown: Shown, slot: Slot, every: Attention) -> dict[str, Any] | None:
        if not 0 <= self._head < len(every.weights):
            return None
        found = neurons(shown.view, slot, shown.at, self._head)
        if found is None:
            return None
        sides = {"query": found.query, "key": found.key, "weights": every.weights[found.head]}
        packed = {
            name: base64.b64encode(np.ascontiguousarray(side, "<f4").tobytes()).decode()
            for name, side in sides.items()
        }
        return {"head": found.head, "width": found.query.shape[1], **packed}

    def _on_message(self, message: Message) -> None:
        if "neurons" in message:
            self._head = message["neurons"]
            self.again()
            return
        slot = self._layers[message["layer"]]
        self.act(node=slot.node, role=slot.role, iteration=slot.iteration)


def _whole(slot: Slot, found: Attention) -> dict[str, Any]:
    return {
        "name": _name(slot),
        "facts": found.facts,
        "heads": len(found.weights),
        "queries": list(found.queries),
        "keys": list(found.keys),
        "weights": _bytes(found.weights),
        "largest": _largest(found.weights).tolist(),
    }


def _small(slot: Slot, found: Attention | None) -> dict[str, Any]:
    small = np.zeros((0, 1, 1), np.float32) if found is None else thumbnails(found)
    heads, rows, columns = small.shape
    return {
        "name": _name(slot), "heads": heads, "rows": rows, "columns": columns,
        "weights": _bytes(small),
    }  # fmt: skip


def _name(slot: Slot) -> str:
    call = f" #{slot.iteration}" if slot.iteration else ""
    role = "" if slot.role == "output" else f" {slot.role}"
    return f"{slot.node}{role}{call}"


def _largest(weights: Floats) -> Floats:
    """Return the largest weight of each head, [heads]."""
    finite = np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)
    largest: Floats = finite.reshape(len(weights), -1).max(1, initial=0.0)
    return largest


def _bytes(weights: Floats) -> str:
    """Return the weights as base64 of bytes; 255 is the largest weight of each head."""
    most = _largest(weights)[:, None, None]
    share = np.divide(weights, most, out=np.zeros_like(weights), where=most > 0)
    share = np.nan_to_num(share, nan=0.0)
    return base64.b64encode(np.rint(np.clip(share, 0, 1) * 255).astype(np.uint8)).decode()
