"""The dependency graph of the step, coloured by kind or by a statistic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.graph import GraphView
from comgra_decl.viewer.graph.layout import (
    Outline,
    Room,
    Scene,
    box_of,
    closed,
    expansion_for,
    node_of,
)
from comgra_decl.viewer.model.between import between_of, boxes_of
from comgra_decl.viewer.model.graph import Graph, graph_of, info_of, loose_of
from comgra_decl.viewer.model.painting import painted
from comgra_decl.viewer.model.tables import graph_csv
from comgra_decl.viewer.model.takeaway import CSV, clean_name
from comgra_decl.viewer.panes.base import Pane, Shown
from comgra_decl.viewer.state import HIDDEN, LEAST, MOST, SHOWN

_USUAL = Room(1000.0, 160.0)
"""The room for the drawing until the browser reports it: that on a laptop's screen."""


class GraphPane(Pane):
    """The graph. A click selects a node, and a double click expands a group."""

    reads: ClassVar = frozenset(
        {"run", "revision", "type", "step", "node", "role", "iteration", "batch", "statistic",
         "colour", "expanded", "looked", "pass_", "other", "other_step", "other_type",
         "other_revision", "between", "route", "brush"}
    )  # fmt: skip

    def build(self) -> Any:
        """Create the drawing."""
        self._graph: Graph | None = None
        self._expanded: frozenset[str] | None = None
        self._opened: frozenset[str] = frozenset()
        self._scene: Scene | None = None
        self._room = _USUAL
        self._outline: Outline | None = None
        self._new = False  # the scene is not sent yet
        self.tall = False  # whether the graph needs a tall pane
        self._fitted: Callable[[], None] = lambda: None
        self._look: Callable[[str, str], None] | None = None
        self.view = GraphView(sizing_mode="stretch_both", margin=0)
        self.view.on_message(self._on_message)
        return self.view

    def on_fit(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the size of the drawing area has changed."""
        self._fitted = callback

    def on_look(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(node, role)` when the pointer rests on a node, before a likely click."""
        self._look = callback

    def components(self) -> list[Any]:
        """Return the drawing, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Recomputes the layout if the graph or its folding has changed, otherwise only colours."""
        changes: dict[str, Any] = {}
        structure = _structure_hash(shown), len(shown.view.slots)
        graph = shown.view.ever(("graph", *structure), lambda: graph_of(shown.view, shown.at))
        self._outline = shown.view.ever(
            ("outline", *structure), lambda: Outline(graph.nodes, graph.edges)
        )
        if graph is not self._graph or shown.expanded != self._expanded:
            self._lay_out(graph, shown.expanded)
        if self._new:
            assert self._scene is not None
            changes["scene"] = self._scene.as_json()
            self._new = False
        assert self._scene is not None
        changes["selected"] = box_of(self._scene, graph.name_of(shown.at)) or ""
        changes["info"] = info_of(shown.view, shown.at, graph)
        changes["loose"] = loose_of(shown.at, graph, self._scene)
        changes["path"] = self._path(shown, graph)
        paint = painted(
            shown.view, shown.at, graph, scene=self._scene, colour=shown.colour,
            pass_=shown.pass_, other=shown.other, samples=shown.brush.samples,
        )  # fmt: skip
        changes["heat"], changes["legend"] = paint.boxes, paint.legend
        changes["flow"] = [*paint.edges]
        self.view.put(**changes)

    def _path(self, shown: Shown, graph: Graph) -> list[str]:
        """Return the boxes on the chosen path between two nodes."""
        found = between_of(shown.view, shown.at, shown.between) if shown.between else None
        if found is None or not found.paths:
            return []
        assert self._scene is not None
        path = found.paths[min(shown.route, len(found.paths) - 1)]
        return boxes_of(self._scene, graph, path.slots)

    def revealed(self, node: str) -> frozenset[str] | None:
        """Return the groups to expand so that a node gets its own box."""
        box = None if self._scene is None else box_of(self._scene, node)
        opened = expansion_for(node, self._opened)
        if box is None or box == node or opened == self._opened:
            return self._expanded
        return opened

    def _lay_out(self, graph: Graph, expanded: frozenset[str] | None) -> None:
        assert self._outline is not None
        first = self._outline.folding(self._room)
        self.tall = self._outline.needs_height(self._room.width)
        self._opened = first.expanded if expanded is None else expanded
        scene = self._outline.scene(self._opened, room=self._room, limit=first.limit)
        self._new = self._new or scene != self._scene
        self._scene, self._graph, self._expanded = scene, graph, expanded

    def _fit(self, room: Room) -> None:
        """Lays out the graph for a drawing area of another size."""
        self._room = room
        if self._graph is not None:
            self._lay_out(self._graph, self._expanded)
            self.again()
            self._fitted()

    def _on_message(self, message: Message) -> None:
        ((action, value),) = message.items()
        if action == "room":
            self._fit(Room(*map(float, value)))
        elif action == "height":
            self.act(graph=str(min(max(value, LEAST), MOST)))
        elif action == "shown":
            self.act(graph=SHOWN if value else HIDDEN)
        elif self._scene is not None and self._graph is not None:
            self._on_click(action, value)

    def _on_click(self, action: str, value: str) -> None:
        assert self._scene is not None
        node = node_of(self._scene, value)
        if action == "select" and node is not None:
            self._select(node, between="", route=0)
        elif action == "between" and node is not None:
            self.act(between=self._tensor(node)[0], route=0, expanded=self._expanded)
        elif action == "look" and node is not None and self._look is not None:
            self._look(*self._tensor(node))
        elif action == "expand":
            self.act(expanded=self._opened | {value})
        elif action == "collapse":
            self.act(expanded=closed(value, self._opened))
        elif action == "save":
            self._save()
        elif action == "search":
            self._search(value)

    def _save(self) -> None:
        assert self._graph is not None
        if self._shown is not None:
            table = graph_csv(self._shown.view, self._shown.at, self._graph, self._shown.colour)
            at = self._shown.at
            name = clean_name(f"step{at.step}", at.wide.statistic, "graph", ending=".csv")
            self.view.hand_over(name, table, kind=CSV)

    def _search(self, text: str) -> None:
        assert self._graph is not None
        names = [node.name for node in self._graph.nodes]
        found = best_match(names, text)
        if found is not None:
            self._select(found, expanded=expansion_for(found, self._opened))

    def _select(self, name: str, **changes: Any) -> None:
        """Select a drawn node without changing which groups are folded."""
        node, role = self._tensor(name)
        self.act(**{"node": node, "role": role, "expanded": self._expanded, **changes})

    def _tensor(self, name: str) -> tuple[str, str]:
        """Return the node and role of a drawn node. A parameter belongs to its module's node."""
        assert self._graph is not None
        node, role = self._graph.parameters.get(name, (name, ""))
        if not role and self._shown is not None:
            owned = {r for n, r in self._graph.parameters.values() if n == node}
            computed = [r for r in self._shown.view.roles(node) if r not in owned]
            now = self._shown.at.role
            role = now if now in computed else next(iter(computed), "")
        return node, role


def best_match(names: list[str], text: str) -> str | None:
    """Return the best match: an exact name, or else the shortest name that contains `text`.

    Names that end with the text are preferred.
    """
    wanted = text.strip().lower()
    if not wanted:
        return None
    lowered = {name: name.lower() for name in names}
    for fits in (str.__eq__, str.endswith, str.__contains__):
        hits = [name for name in names if fits(lowered[name], wanted)]
        if hits:
            return min(hits, key=len)
    return None


def _structure_hash(shown: Shown) -> str:
    at = shown.at
    return "" if at.step is None else shown.view.structure_hash(at.step, at.type) or ""
