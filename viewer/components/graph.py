"""The clickable dependency graph."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source

_SEARCH_LENGTH = 300
_LONGEST = 20_000  # pixels


class GraphView(Component):
    """Draws a `Scene` and reports clicks.

    Messages: `{"select": box id}`, `{"look": box id}` (the pointer rests there), `{"between": box
    id}` (compare the selected box with this one), `{"expand": box id}`, `{"collapse": scope or box
    id}`, `{"save": "csv"}` and `{"search": text}`. The text is user input or the full name of a
    node inside a folded group. `{"room": [width, height]}` is the size of the drawing area in
    pixels, `{"height": pixels}` the height that the user wants for the whole component, and
    `{"shown": bool}` whether the user wants to see it.

    Attributes:
        scene: `Scene.as_json()`.
        selected: Id of the highlighted box, or "". The browser highlights a clicked box itself
            before it sends the message.
        heat: Paint per box id, `{"fill": "#rrggbb", "text": second line, "hatched": bool}`. All
            other boxes are drawn as missing. If None, boxes are coloured by kind.
        painted: `heat` as JSON, which is what the browser receives. Bokeh would search a dict for
            models, which takes longer than everything else if there are a thousand boxes.
        flow: Paint of edges, `{"edge": [box id, box id], "width": pixels, "color": "#rrggbb",
            "text": what the edge says under the pointer}`, drawn in this order over all edges.
        legend: `{"title": str, "low": str, "high": str, "colors": ["#rrggbb", ...]}` for the heat.
            Optional keys are `"log": bool` (shown as text) and `"help": str` (a tooltip).
        info: One line about the selected node, shown below the graph.
        loose: `{"of": box id, "boxes": [box ids]}`, the boxes connected only to other roles of the
            selected node, which have thinner outlines.
        path: Ids of the boxes on a path to mark, in order.
        shown: Whether the drawing is visible below the tools.
    """

    scene = param.Dict(default={"boxes": [], "edges": [], "width": 0, "height": 0, "bands": []})
    selected = param.String(default="")
    heat = param.Dict(default=None, allow_None=True)
    flow = param.List(default=[], item_type=dict)
    painted = param.String(default="null")
    legend = param.Dict(default=None, allow_None=True)
    info = param.String(default="")
    loose = param.Dict(default={"of": "", "boxes": []})
    path = param.List(default=[], item_type=str)
    shown = param.Boolean(default=True)

    _esm = source(
        "shared.js",
        "handover.js",
        "save_menu.js",
        "graph_camera.js",
        "graph_scene.js",
        "graph_boxes.js",
        "graph_highlight.js",
        "graph_find.js",
        "graph_frame.js",
        "graph_groups.js",
        "graph_export.js",
        "graph.js",
    )
    _stylesheets: ClassVar[list[str]] = [source("graph.css")]
    _rename: ClassVar[dict[str, str | None]] = {"heat": None}  # not sent

    @param.depends("heat", watch=True, on_init=True)
    def _paint(self) -> None:
        self.painted = json.dumps(self.heat)

    def check(self, message: Message) -> bool:
        """Return whether the message names a visible element, or is a short search text."""
        ((action, value),) = message.items()
        if action == "room":
            return isinstance(value, list) and len(value) == 2 and all(map(_is_length, value))
        if action == "height":
            return _is_length(value)
        if action == "shown":
            return isinstance(value, bool)
        if not isinstance(value, str):
            return False
        if action == "search":
            return 0 < len(value) <= _SEARCH_LENGTH
        if action == "save":
            return value == "csv"
        return value in self._known(action)

    def accept(self, message: Message) -> None:
        """Select the box that the browser already highlights."""
        if "select" in message:
            self.selected = message["select"]

    def _known(self, action: str) -> set[str]:
        """Return the ids that are valid for an action."""
        boxes: list[dict[str, Any]] = self.scene["boxes"]
        if action in ("select", "look", "between"):
            return {box["id"] for box in boxes}
        if action == "expand":
            return {box["id"] for box in boxes if box["folded"]}
        if action == "collapse":
            return {band["id"] for band in self.scene.get("bands", ())}
        return set()


def _is_length(value: object) -> bool:
    """Return whether a value is a number of pixels that a page may have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LONGEST
