"""Data of the graph view: nodes as input, positioned boxes as output.

Lengths are in scene units; one unit is one CSS pixel at 100% zoom. The origin is the upper left
corner, x grows to the right and y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: Node kinds, in legend order.
KINDS = ("input", "parameter", "buffer", "computed", "target", "loss")

#: Kinds that come from outside the graph, for which a missing dependency is normal.
SOURCE_KINDS = frozenset({"input", "parameter", "buffer", "target"})

# : Kinds independent of the step's input. Values derived only from these kinds are drawn next to
# them.
CONSTANT_KINDS = frozenset({"parameter", "buffer", "target"})


@dataclass(frozen=True)
class GraphNode:
    """One node of the recorded graph.

    Attributes:
        name: Dotted name; its proper prefixes are its module scopes.
        kind: One of `KINDS`.
        order: Position of the node's first execution; nodes with a smaller position ran earlier.
        title: Further text about the node, such as its shape. Two blocks are identical only if
            their nodes' titles agree, ignoring the node's own name.
    """

    name: str
    kind: str
    order: int
    title: str = ""


@dataclass(frozen=True)
class Box:
    """A box: a node, a collapsed scope, or a row of identical scopes.

    Attributes:
        id: Name of the node or of the collapsed scope, or `first..last` of a row of scopes.
        label: Short text inside the box.
        kind: Node kind, shown as a colour. A fold has the kind of its own node or of its outputs.
        x: Left edge.
        y: Upper edge.
        w: Width.
        h: Height.
        folded: Whether the box can be expanded.
        count: Number of nodes inside a fold (over all blocks in a row); otherwise 1.
        repeat: Number of identical blocks in this box; otherwise 1.
        members: Names of all nodes inside; the first represents the box.
        title: Tooltip text; may be empty.
        no_in: Whether the box lacks inputs although its kind needs them.
        no_out: Whether the box has no consumer although its kind needs one.
    """

    id: str
    label: str
    kind: str
    x: float
    y: float
    w: float
    h: float
    folded: bool
    count: int
    repeat: int
    members: tuple[str, ...]
    title: str
    no_in: bool
    no_out: bool


@dataclass(frozen=True)
class Band:
    """Extent of an expanded scope, drawn as a bracket above its columns.

    Spans what the scope computes and, where there is room, its parameters.

    Attributes:
        id: Name of the scope. Collapsing the scope folds everything below it.
        label: Part of the name that the parent's band does not show.
        level: Row of the bracket, 0 for the outermost; brackets in a row never overlap.
        x: Left end.
        w: Width.
    """

    id: str
    label: str
    level: int
    x: float
    w: float


@dataclass(frozen=True)
class Scene:
    """A finished drawing of the graph.

    Attributes:
        boxes: In order of first execution.
        edges: `(source box id, sink box id, carries gradient)`, sorted by the boxes' order.
        width: Width of the drawing.
        height: Height of the drawing.
        bands: Expanded scopes, outermost first.
    """

    boxes: tuple[Box, ...]
    edges: tuple[tuple[str, str, bool], ...]
    width: float
    height: float
    bands: tuple[Band, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the scene as plain lists and dicts for `GraphView.scene`."""
        return {
            "boxes": [_plain(box, _BOX_FIELDS) for box in self.boxes],
            "edges": [list(edge) for edge in self.edges],
            "width": self.width,
            "height": self.height,
            "bands": [_plain(band, _BAND_FIELDS) for band in self.bands],
        }


_BOX_FIELDS = tuple(field.name for field in fields(Box))
_BAND_FIELDS = tuple(field.name for field in fields(Band))


def _plain(item: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a dataclass. `dataclasses.asdict` is slower: it copies deeply."""
    plain = {name: getattr(item, name) for name in names}
    if "members" in plain:
        plain["members"] = list(plain["members"])
    return plain
