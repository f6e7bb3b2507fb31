"""The clickable dependency graph."""

from __future__ import annotations

from typing import Any, ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source

_SEARCH_LENGTH = 300


class GraphView(Component):
    """Draws a `Scene` and says what the user clicked.

    Messages: `{"select": box id}`, `{"look": box id}` (the pointer has come to rest there),
    `{"expand": box id}`, `{"collapse": scope or box id}`, `{"save": "csv"}` and `{"search": text}`,
    where the text is what the user typed or the full name of a node that is inside a fold.

    Attributes:
        scene: `Scene.as_json()`.
        selected: Id of the highlighted box, or "". The browser highlights a clicked box itself
            before it sends the message.
        heat: Paint per box id, `{"fill": "#rrggbb", "text": second line, "hatched": bool}`;
            boxes that are not named are drawn as missing. None: colours by kind.
        legend: `{"title": str, "low": str, "high": str, "colors": ["#rrggbb", ...]}` for the heat;
            optionally `"log": bool` (said on screen) and `"help": str` (a tooltip).
        info: One line about the selected node, shown below the graph.
        loose: `{"of": box id, "boxes": [box ids]}`: which boxes beside a selected one are joined
            with another role of it than the chosen one; they are drawn thinner.
    """

    scene = param.Dict(default={"boxes": [], "edges": [], "width": 0, "height": 0, "bands": []})
    selected = param.String(default="")
    heat = param.Dict(default=None, allow_None=True)
    legend = param.Dict(default=None, allow_None=True)
    info = param.String(default="")
    loose = param.Dict(default={"of": "", "boxes": []})

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
        "graph_export.js",
        "graph.js",
    )
    _stylesheets: ClassVar[list[str]] = [source("graph.css")]

    def check(self, message: Message) -> bool:
        """Whether the message names something that is on screen (or a short text to search)."""
        ((action, value),) = message.items()
        if not isinstance(value, str):
            return False
        if action == "search":
            return 0 < len(value) <= _SEARCH_LENGTH
        if action == "save":
            return value == "csv"
        return value in self._known(action)

    def accept(self, message: Message) -> None:
        """Selects what the browser already shows as selected."""
        if "select" in message:
            self.selected = message["select"]

    def _known(self, action: str) -> set[str]:
        """Returns the ids that an action may name."""
        boxes: list[dict[str, Any]] = self.scene["boxes"]
        if action in ("select", "look"):
            return {box["id"] for box in boxes}
        if action == "expand":
            return {box["id"] for box in boxes if box["folded"]}
        if action == "collapse":
            return {band["id"] for band in self.scene.get("bands", ())}
        return set()
