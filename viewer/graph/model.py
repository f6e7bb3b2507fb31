"""What the graph view draws: nodes in, boxes with places out.

All lengths are in scene units; one unit is one CSS pixel at 100 % zoom. The origin is the upper
left corner of the drawing, x grows to the right and y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

#: Kinds of node, in the order of the legend.
KINDS = ("input", "parameter", "buffer", "computed", "target", "loss")

#: Kinds that come from outside the graph, so having no dependency says nothing about them.
SOURCE_KINDS = frozenset({"input", "parameter", "buffer", "target"})

#: Kinds that do not depend on the step's input; what is made of them alone is drawn beside them.
CONSTANT_KINDS = frozenset({"parameter", "buffer", "target"})


@dataclass(frozen=True)
class GraphNode:
    """One node of the recorded graph.

    Attributes:
        name: Dotted name; its proper prefixes are the module scopes that hold it.
        kind: One of `KINDS`.
        order: Position of the node's first execution; smaller ran earlier.
        title: What to say about the node besides its name, e.g. its shape. Two blocks count as
            identical only if the titles of their nodes agree (the node's own name in it is
            ignored).
    """

    name: str
    kind: str
    order: int
    title: str = ""


@dataclass(frozen=True)
class Box:
    """One drawn box: a node, a folded scope, or a row of identical scopes drawn once.

    Attributes:
        id: The node's name, the folded scope's name, or `first..last` of a row of scopes.
        label: Short text to draw inside.
        kind: Colours the box; a fold takes the kind of its own node or of what it computes.
        x: Left edge.
        y: Upper edge.
        w: Width.
        h: Height.
        folded: Whether opening the box shows more.
        count: Nodes inside the fold (of all blocks in a row), else 1.
        repeat: Number of identical blocks that this box stands for, else 1.
        members: Names of all nodes inside; the first one stands for the box.
        title: Longer text for tooltips; may be empty.
        no_in: No other box feeds this one, though its kind calls for it.
        no_out: This box feeds no other, though its kind calls for it.
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
    """The extent of an opened scope, drawn as a bracket above the columns it covers.

    It spans what the scope computes and, where there is room, its parameters beside that.

    Attributes:
        id: Name of the scope; closing it folds everything below.
        label: The part of the name that its parent's band does not already say.
        level: Row of the bracket, 0 for the outermost; brackets of one row never overlap.
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
        width: Of the whole drawing.
        height: Of the whole drawing.
        bands: Opened scopes, outermost first.
    """

    boxes: tuple[Box, ...]
    edges: tuple[tuple[str, str, bool], ...]
    width: float
    height: float
    bands: tuple[Band, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the scene as plain lists and dicts, what `GraphView.scene` takes."""
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
    """Returns the fields of a dataclass; `dataclasses.asdict` copies deeply and is far slower."""
    plain = {name: getattr(item, name) for name in names}
    if "members" in plain:
        plain["members"] = list(plain["members"])
    return plain
