"""Turns the recorded graph into a drawing: folds it, assigns columns, places boxes.

Entry points for the viewer; plain Python without Panel. The same input always gives the same
scene.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from comgra_decl.viewer.graph.bands import bands
from comgra_decl.viewer.graph.folding import (
    Scope,
    Visible,
    closed,
    default_expansion,
    expansion_for,
    opened_scopes,
    scope_tree,
    visible_boxes,
)
from comgra_decl.viewer.graph.layering import acyclic, columns, sorted_columns
from comgra_decl.viewer.graph.model import CONSTANT_KINDS, SOURCE_KINDS, Band, Box, GraphNode, Scene
from comgra_decl.viewer.graph.places import MARGIN, box_size, place

__all__ = [
    "Band",
    "Box",
    "GraphNode",
    "Scene",
    "box_of",
    "build_scene",
    "closed",
    "default_expansion",
    "expansion_for",
    "node_of",
]

_Links = dict[tuple[int, int], bool]


def build_scene(
    nodes: Sequence[GraphNode],
    edges: Iterable[tuple[str, str, bool]],
    *,
    expanded: frozenset[str],
    limit: int = 60,
) -> Scene:
    """Returns the drawing of a graph with some of its module scopes expanded.

    Every node is in exactly one box. Edges inside a box are omitted. Parallel edges are merged into
    one edge, which carries a gradient if any of them does. Edges with unknown nodes are ignored.
    Edges go from left to right, except those that close a cycle (a reused group, a recurrent net).

    Args:
        nodes: The nodes of the graph, in any order.
        edges: `(source name, sink name, carries gradient)`, in any order.
        expanded: Expanded scopes: names of boxes with `folded`, as sent by `{"expand": id}`.
        limit: If there are more boxes than this, three or more numbered neighbours of the same
            structure share one box (longest rows first), unless that box is in `expanded`.
    """
    root = scope_tree(nodes)
    visible = sorted(visible_boxes(root, expanded, limit), key=lambda box: (box.order, box.id))
    links = _links(visible, edges)
    boxes = _placed(visible, links)
    named = tuple((boxes[u].id, boxes[v].id, grad) for (u, v), grad in links.items())
    width = max((box.x + box.w for box in boxes), default=0.0) + MARGIN
    height = max((box.y + box.h for box in boxes), default=0.0) + MARGIN
    return Scene(boxes, named, width, height, bands(opened_scopes(root, expanded), boxes))


def _placed(visible: Sequence[Visible], links: _Links) -> tuple[Box, ...]:
    """Returns the boxes with their positions."""
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
    rects = place(grid, sizes, rank, graph.after)
    return tuple(
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
        )
        for i, box in enumerate(visible)
    )


def box_of(scene: Scene, name: str) -> str | None:
    """Returns the id of the box that contains the node `name`, or None."""
    return next((box.id for box in scene.boxes if name in box.members), None)


def node_of(scene: Scene, box: str) -> str | None:
    """Returns the node that represents a box (for a fold, the module itself), or None."""
    return next((b.members[0] for b in scene.boxes if b.id == box), None)


def _links(visible: Sequence[Visible], edges: Iterable[tuple[str, str, bool]]) -> _Links:
    """Returns the edges between boxes by number, and whether they carry gradient."""
    holder = {node.name: i for i, box in enumerate(visible) for node in box.nodes}
    links: _Links = {}
    for source, sink, gradient in edges:
        u, v = holder.get(source, -1), holder.get(sink, -1)
        if u != v and u >= 0 and v >= 0:
            links[u, v] = links.get((u, v), False) or gradient
    return {link: links[link] for link in sorted(links)}


def _kind(box: Visible) -> str:
    """Returns the kind that colours a box."""
    own = box.scopes[0].own
    if own is not None:
        return own.kind
    kinds = [node.kind for node in box.nodes]
    return "computed" if "computed" in kinds else kinds[0]


def _members(box: Visible) -> tuple[str, ...]:
    """Returns the names in a box, starting with the module's own node or the last computed one."""
    names = [node.name for node in box.nodes]
    if box.scopes[0].own is None:
        first = box.scopes[0].nodes()
        lead = max(first, key=lambda node: (node.kind == "computed", node.order, node.name))
        names.remove(lead.name)
        names.insert(0, lead.name)
    return tuple(names)


def _label(box: Visible) -> str:
    """Returns a box's short label; the bands above show the rest of the name."""
    first, last = box.scopes[0], box.scopes[-1]
    if len(box.scopes) > 1:
        return f"{_short(first)}\u2013{last.name}"
    return _short(first)


def _short(scope: Scope) -> str:
    """Returns a name's last part, preceded by the part before it if the last is ambiguous."""
    parts = scope.id.split(".")
    kind = scope.own.kind if scope.own else ""
    vague = scope.name.isdigit() or kind in ("parameter", "buffer")
    return ".".join(parts[-2:] if vague else parts[-1:])


def _badge(box: Visible) -> str:
    """Returns the number next to the label of a folded box."""
    if len(box.scopes) > 1:
        return f"\u00d7{len(box.scopes)}"
    return str(len(box.nodes)) if box.folded else ""


def _title(box: Visible) -> str:
    """Returns the title of the box's own node."""
    own = box.scopes[0].own
    return own.title if own is not None else ""
