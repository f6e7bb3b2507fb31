"""Turns the recorded graph into a drawing: folds it, assigns columns, places boxes.

Entry points for the viewer; plain Python without Panel. The same input always gives the same
scene.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from comgra_decl.viewer.graph.bands import bands
from comgra_decl.viewer.graph.folding import (
    Folding,
    Opened,
    Scope,
    Visible,
    closed,
    expansion_for,
    first_folding,
    opened_scopes,
    scope_tree,
    visible_boxes,
)
from comgra_decl.viewer.graph.layering import acyclic, columns, sorted_columns
from comgra_decl.viewer.graph.model import (
    CONSTANT_KINDS,
    SOURCE_KINDS,
    Band,
    Box,
    GraphNode,
    Room,
    Scene,
)
from comgra_decl.viewer.graph.places import MARGIN, box_size, centres, lines, spread, wrapped
from comgra_decl.viewer.graph.quiet import is_activation

__all__ = [
    "Band",
    "Box",
    "Folding",
    "GraphNode",
    "Outline",
    "Room",
    "Scene",
    "box_of",
    "build_scene",
    "closed",
    "expansion_for",
    "node_of",
]

_Links = dict[tuple[int, int], bool]
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

READABLE = 0.7
"""Smallest zoom at which the labels of boxes can be read: at zoom 1, letters have 12 pixels."""

_SPACE = 110.0, 84.0
"""Width and height that a box takes up, including the gap to the next box and the bands."""

USUAL_HEIGHT, TALL_HEIGHT = 150.0, 236.0
"""Heights of the drawing area in a window of 800 pixels, for most networks and for long ones."""

_MOST, _LEAST = 60, 12
"""Numbers of boxes above which identical blocks share one, in any room and in the smallest room."""


_FOLDINGS, _SCENES = 64, 16
"""Numbers of foldings and of drawings that are kept for a graph."""

_HEADS = 3
"""Maximum number of lines of bands to draw."""


class Outline:
    """A graph and its module tree. Each drawing shows a part of them.

    Keeps what it has laid out, because every session of a viewer draws the same graph.

    Args:
        nodes: The nodes of the graph, in any order.
        edges: `(source name, sink name, carries gradient)`, in any order.
    """

    def __init__(self, nodes: Sequence[GraphNode], edges: Sequence[tuple[str, str, bool]]) -> None:
        self._edges = edges
        self._root = scope_tree(nodes, edges)
        self._known: dict[Room, Folding] = {}
        self._scenes: dict[tuple[frozenset[str], Room | None, int], Scene] = {}

    def folding(self, room: Room) -> Folding:
        """Return the folding of the first view: as many scopes are expanded as can be read."""

        def fits(folding: Folding) -> bool:
            scene = self.scene(folding.expanded, room=room, limit=folding.limit)
            return room.zoom(scene.width, scene.height) >= READABLE

        found = self._known.get(room)
        if found is None:
            found = first_folding(self._root, most_boxes(room), fits)
            _keep(self._known, room, found, most=_FOLDINGS)
        return found

    def needs_height(self, width: float) -> bool:
        """Return whether blocks share a box at the usual pane height, but not in a taller pane."""
        merged = [
            any(len(box.scopes) > 1 for box in visible_boxes(self._root, one.expanded, one.limit))
            for one in (self.folding(Room(width, high)) for high in (USUAL_HEIGHT, TALL_HEIGHT))
        ]
        return merged == [True, False]

    def scene(
        self, expanded: frozenset[str], *, room: Room | None = None, limit: int = _MOST
    ) -> Scene:
        """Return the drawing with some scopes expanded.

        Every node is in exactly one box. Edges inside a box are omitted. Parallel edges are merged
        into one edge, which carries a gradient if any of them does. Edges with unknown nodes are
        ignored. Edges go from left to right and from row to row, except those that close a cycle (a
        reused group, a recurrent net).

        Args:
            expanded: Expanded scopes: names of boxes with `folded`, as sent by `{"expand": id}`.
            room: Size of the drawing area, into which long drawings are wrapped. None: one row.
            limit: If there are more boxes than this, three or more numbered neighbours with the
                same structure share one box (longest rows first), unless that box is in `expanded`.
        """
        key = expanded, room, limit
        found = self._scenes.get(key)
        if found is None:
            found = self._drawn(*key)
            _keep(self._scenes, key, found, most=_SCENES)
        return found

    def _drawn(self, expanded: frozenset[str], room: Room | None, limit: int) -> Scene:
        root = self._root
        visible = sorted(visible_boxes(root, expanded, limit), key=lambda box: (box.order, box.id))
        links = _links(visible, self._edges)
        opened = list(opened_scopes(root, expanded))
        boxes, bands_, rows = _placed(visible, links, opened, room)
        named = tuple((boxes[u].id, boxes[v].id, grad) for (u, v), grad in links.items())
        width = max((box.x + box.w for box in boxes), default=0.0) + MARGIN
        height = max((box.y + box.h for box in boxes), default=0.0) + MARGIN
        return Scene(boxes, named, width, height, bands_, rows)


def _keep(known: dict[_Key, _Value], key: _Key, value: _Value, *, most: int) -> None:
    """Add an entry; without room for it, first drop the oldest one."""
    if len(known) >= most:
        del known[next(iter(known))]
    known[key] = value


def build_scene(
    nodes: Sequence[GraphNode],
    edges: Iterable[tuple[str, str, bool]],
    *,
    expanded: frozenset[str],
    limit: int = _MOST,
    room: Room | None = None,
) -> Scene:
    """Return the drawing of a graph with some of its module scopes expanded; see `Outline`."""
    return Outline(nodes, list(edges)).scene(expanded, limit=limit, room=room)


def most_boxes(room: Room) -> int:
    """Return the number of boxes that can be read in a room."""
    across, down = (
        int(size / READABLE // space)
        for size, space in zip((room.width, room.height), _SPACE, strict=True)
    )
    return min(_MOST, max(_LEAST, across * down))


_Placed = tuple[tuple[Box, ...], tuple[Band, ...], tuple[tuple[float, float], ...]]


def _placed(
    visible: Sequence[Visible], links: _Links, opened: Sequence[Opened], room: Room | None
) -> _Placed:
    """Return the boxes with their positions, the bands, and the edges of the rows."""
    kinds, labels = [_kind(box) for box in visible], [_label(box) for box in visible]
    graph = acyclic(len(visible), list(links))
    inputs = [kind == "input" for kind in kinds]
    constants = [kind in CONSTANT_KINDS for kind in kinds]
    grid = sorted_columns(graph, columns(graph, inputs, constants))
    sizes = [
        box_size(label, kind, _badge(box))
        for label, kind, box in zip(labels, kinds, visible, strict=True)
    ]
    fed, feeding = {sink for _, sink in links}, {source for source, _ in links}
    linked = fed | feeding
    rank = [inputs[i] + 2 * constants[i] + 4 * (i not in linked) for i in range(len(visible))]
    drawn = lines(grid, sizes, rank, graph.after)
    rows = wrapped(drawn, links, room, int(bool(opened)))
    row_of = {i: n for n, row in enumerate(rows) for column in row for i in grid[column]}
    rects = spread(drawn, rows)
    boxes = tuple(
        Box(
            box.id,
            labels[i],
            kinds[i],
            *rects[i],
            folded=box.folded,
            count=len(box.nodes),
            repeat=len(box.scopes),
            members=_members(box),
            title=_title(box),
            no_in=i not in fed and kinds[i] not in SOURCE_KINDS,
            no_out=i not in feeding and kinds[i] != "loss",
            plain=_is_plain(box),
            marks=_marks(box),
            row=row_of[i],
        )
        for i, box in enumerate(visible)
    )
    found = bands(opened, boxes)
    heads = [
        max(
            (band.level + 1 for band in found if band.row == row and band.level < _HEADS), default=0
        )
        for row in range(len(rows))
    ]
    lows = centres(drawn, rows, heads.__getitem__)
    moved = tuple(replace(box, y=box.y + lows[box.row]) for box in boxes)
    reach = [drawn.reach(row) for row in rows]
    edges = tuple((y - up, y + down) for y, (up, down) in zip(lows, reach, strict=True))
    return moved, found, edges if boxes else ()


def box_of(scene: Scene, name: str) -> str | None:
    """Return the id of the box that contains the node `name`, or None."""
    return next((box.id for box in scene.boxes if name in box.members), None)


def node_of(scene: Scene, box: str) -> str | None:
    """Return the node that represents a box (for a fold, the module itself), or None."""
    return next((b.members[0] for b in scene.boxes if b.id == box), None)


def _links(visible: Sequence[Visible], edges: Iterable[tuple[str, str, bool]]) -> _Links:
    """Return the edges between boxes by number, and whether they carry gradient."""
    holder = {node.name: i for i, box in enumerate(visible) for node in box.nodes}
    links: _Links = {}
    for source, sink, gradient in edges:
        u, v = holder.get(source, -1), holder.get(sink, -1)
        if u != v and u >= 0 and v >= 0:
            links[u, v] = links.get((u, v), False) or gradient
    return {link: links[link] for link in sorted(links)}


def _kind(box: Visible) -> str:
    """Return the kind that colours a box."""
    own = box.scopes[0].own
    if own is not None:
        return own.kind
    kinds = [node.kind for node in box.nodes]
    return "computed" if "computed" in kinds else kinds[0]


def _members(box: Visible) -> tuple[str, ...]:
    """Return the names in a box, starting with the module's own node or the last computed one."""
    names = [node.name for node in box.nodes]
    if box.scopes[0].own is None:
        first = box.scopes[0].nodes
        lead = max(first, key=lambda node: (node.kind == "computed", node.order, node.name))
        names.remove(lead.name)
        names.insert(0, lead.name)
    return tuple(names)


def _label(box: Visible) -> str:
    """Return a box's short label; the bands above show the rest of the name."""
    first, last = box.scopes[0], box.scopes[-1]
    if len(box.scopes) > 1:
        return f"{_short(first)}\u2013{last.name}"
    if not _is_plain(box):
        return _short(first)
    joined = [scope.own for scope in first.ranked if scope.own is not None]
    parts = {node.order: _spoken(node) for node in joined if is_activation(node.module)}
    assert first.own is not None
    parts[first.own.order] = _short(first)
    return " \u00b7 ".join(parts[order] for order in sorted(parts))


def _spoken(node: GraphNode) -> str:
    """Return the name of an activation, or its class if its name is only a number."""
    name = node.name.rpartition(".")[2]
    return node.module if name.isdigit() else name


def _is_plain(box: Visible) -> bool:
    """Return whether a box is a single module with its parameters and quiet neighbours."""
    return box.folded and len(box.scopes) == 1 and box.scopes[0].plain


def _marks(box: Visible) -> tuple[str, ...]:
    """Return the parameters and buffers that are drawn as marks of a box."""
    if not _is_plain(box):
        return ()
    inside = (scope.own for scope in box.scopes[0].ranked if scope.own is not None)
    return tuple(node.name for node in inside if node.kind in ("parameter", "buffer"))


def _short(scope: Scope) -> str:
    """Return a name's last part, preceded by the part before it if the last is ambiguous."""
    parts = scope.id.split(".")
    kind = scope.own.kind if scope.own else ""
    vague = scope.name.isdigit() or kind in ("parameter", "buffer")
    return ".".join(parts[-2:] if vague else parts[-1:])


def _badge(box: Visible) -> str:
    """Return the number next to the label of a folded box."""
    if len(box.scopes) > 1:
        return f"\u00d7{len(box.scopes)}"
    return str(len(box.nodes)) if box.folded and not _is_plain(box) else ""


def _title(box: Visible) -> str:
    """Return the title of the box's own node."""
    own = box.scopes[0].own
    return own.title if own is not None else ""
