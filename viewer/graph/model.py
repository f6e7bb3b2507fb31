"""Data of the graph view: nodes as input, positioned boxes as output.

Lengths are in scene units; one unit is one CSS pixel at 100% zoom. The origin is the upper-left
corner; x grows to the right and y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: Node kinds, in legend order.
KINDS = ("input", "parameter", "buffer", "computed", "target", "loss")

#: Kinds that come from outside the graph, for which a missing dependency is normal.
SOURCE_KINDS = frozenset({"input", "parameter", "buffer", "target"})

#: Kinds independent of the step's input. Values derived only from these are drawn next to them.
CONSTANT_KINDS = frozenset({"parameter", "buffer", "target"})


@dataclass(frozen=True)
class GraphNode:
    """One node of the recorded graph.

    Attributes:
        name: Dotted name; its proper prefixes are its module scopes.
        kind: One of `KINDS`.
        order: Position of the node's first execution; nodes with a smaller position ran earlier.
        title: Additional text about the node, such as its shape. Two blocks are identical only if
            their nodes' titles agree, ignoring the node's own name.
        module: Class of the module; "" if the node is not the output of a module.
    """

    name: str
    kind: str
    order: int
    title: str = ""
    module: str = ""


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
        plain: Whether the box is a single module with its parameters and quiet neighbours. It is
            drawn like a node, although it can be expanded.
        marks: Names of the parameters and buffers in a plain box.
        row: Row of the drawing, from the top, if the drawing is wrapped.
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
    plain: bool = False
    marks: tuple[str, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class Band:
    """Extent of an expanded scope, drawn as a bracket above its columns.

    Spans what the scope computes and, where there is room, its parameters.

    Attributes:
        id: Name of the scope. Collapsing the scope folds everything below it.
        label: Part of the name that the parent's band does not show.
        level: Line of the bracket, 0 for the outermost; brackets in a line never overlap.
        x: Left end.
        w: Width.
        row: Row of the drawing; a scope that continues in the next row has a band in each.
    """

    id: str
    label: str
    level: int
    x: float
    w: float
    row: int = 0


@dataclass(frozen=True)
class Room:
    """The size of the drawing area.

    Attributes:
        width: Width in CSS pixels.
        height: Height in CSS pixels.
    """

    width: float
    height: float

    def zoom(self, width: float, height: float) -> float:
        """Return the largest zoom at which a drawing of this size fits, at most 1."""
        return min(1.0, self.width / max(width, 1.0), self.height / max(height, 1.0))


@dataclass(frozen=True)
class Scene:
    """A finished drawing of the graph.

    Attributes:
        boxes: In order of first execution.
        edges: `(source box id, sink box id, carries gradient)`, sorted by the boxes' order.
        width: Width of the drawing.
        height: Height of the drawing.
        bands: Expanded scopes, outermost first.
        rows: Upper and lower edge of each row of the drawing, without its bands.
    """

    boxes: tuple[Box, ...]
    edges: tuple[tuple[str, str, bool], ...]
    width: float
    height: float
    bands: tuple[Band, ...] = ()
    rows: tuple[tuple[float, float], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the scene as plain lists and dicts for `GraphView.scene`."""
        return {
            "boxes": [_plain(box, _BOX_FIELDS) for box in self.boxes],
            "edges": [list(edge) for edge in self.edges],
            "width": self.width,
            "height": self.height,
            "bands": [_plain(band, _BAND_FIELDS) for band in self.bands],
            "rows": [list(row) for row in self.rows],
        }


_BOX_FIELDS = tuple(field.name for field in fields(Box))
_BAND_FIELDS = tuple(field.name for field in fields(Band))


def _plain(item: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a dataclass. `dataclasses.asdict` is slower, since it copies deeply."""
    plain = {name: getattr(item, name) for name in names}
    for name in ("members", "marks"):
        if name in plain:
            plain[name] = list(plain[name])
    return plain
