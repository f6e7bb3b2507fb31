"""Folds the graph by module scope: decides which nodes get their own box and which share one.

A scope is a proper dotted prefix of a node's name. A collapsed scope is one box. The node of a
module (`blocks.0`) and the scope of the same name share that box; once the scope is expanded, the
node gets its own box next to its children.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from comgra_decl.viewer.graph.model import GraphNode

#: Minimum number of identical blocks that may share a box.
SHORTEST_ROW = 3


@dataclass(eq=False)
class Scope:
    """A name in the module tree: its own node, if any, and the names below it."""

    id: str
    name: str
    own: GraphNode | None = None
    children: dict[str, Scope] = field(default_factory=dict)
    order: int = 0
    size: int = 0
    shape: int = 0  # equal for scopes with the same structure
    ranked: list[Scope] = field(default_factory=list)  # children by first execution

    def nodes(self) -> Iterator[GraphNode]:
        """Yields the scope's own node, then the nodes below it in execution order."""
        if self.own is not None:
            yield self.own
        for child in self.ranked:
            yield from child.nodes()


@dataclass(eq=False)
class Visible:
    """A box to draw: a single node, a collapsed scope, or a row of identical scopes."""

    id: str
    nodes: tuple[GraphNode, ...]
    scopes: tuple[Scope, ...]
    folded: bool

    @property
    def order(self) -> int:
        """Earliest execution of any node inside."""
        return self.scopes[0].order


def scope_tree(nodes: Iterable[GraphNode]) -> Scope:
    """Returns the root of the module tree; if names are equal, the first node is used."""
    root = Scope("", "")
    for node in nodes:
        scope, path = root, ""
        for part in node.name.split("."):
            path = f"{path}.{part}" if scope is not root else part
            child = scope.children.get(part)
            if child is None:
                child = scope.children[part] = Scope(path, part)
            scope = child
        scope.own = scope.own or node
    _measure(root, {})
    return root


def _measure(scope: Scope, shapes: dict[object, int]) -> None:
    """Computes order, size and shape bottom-up."""
    for child in scope.children.values():
        _measure(child, shapes)
    scope.ranked = sorted(scope.children.values(), key=lambda child: (child.order, child.id))
    looks, own = None, scope.own
    if own is not None:
        scope.order, scope.size = own.order, 1
        looks = own.kind, own.title.replace(own.name, "")
    if scope.ranked:
        first = scope.ranked[0].order
        scope.order = first if own is None else min(first, own.order)
        scope.size += sum(child.size for child in scope.ranked)
    inside = tuple(sorted((child.name, child.shape) for child in scope.ranked))
    scope.shape = shapes.setdefault((looks, inside), len(shapes))


def visible_boxes(root: Scope, expanded: frozenset[str], limit: int) -> list[Visible]:
    """Returns the boxes to draw.

    If there are more than `limit` boxes, rows of identical blocks share one box. The longest rows
    are merged first.
    """
    merged: set[str] = set()
    boxes = list(_children(root, expanded, merged))
    if len(boxes) <= limit:
        return boxes
    excess = len(boxes) - limit
    for row in sorted(_closed_rows(root, expanded), key=len, reverse=True):
        if excess > 0:
            merged.add(row_id(row))
            excess -= len(row) - 1
    return list(_children(root, expanded, merged)) if merged else boxes


@dataclass(frozen=True)
class Opened:
    """An expanded scope, or row of identical scopes, visible inside `parent`."""

    id: str
    label: str
    parent: str
    scopes: tuple[Scope, ...]


def opened_scopes(root: Scope, expanded: frozenset[str]) -> Iterator[Opened]:
    """Yields the expanded visible scopes, outer ones first."""
    start = len(root.id) + 1 if root.id else 0
    for row in _rows(root, expanded):
        if len(row) >= SHORTEST_ROW and row_id(row) in expanded:
            yield Opened(row_id(row), row_id(row)[start:], root.id, tuple(row))
        for child in map(_innermost, row):
            if child.children and child.id in expanded:
                yield Opened(child.id, child.id[start:], root.id, (child,))
                yield from opened_scopes(child, expanded)


def _children(
    scope: Scope, expanded: frozenset[str], merged: AbstractSet[str]
) -> Iterator[Visible]:
    """Yields the boxes below an expanded scope; `merged` names rows that share one box."""
    for row in _rows(scope, expanded) if merged else ([child] for child in scope.ranked):
        if len(row) > 1 and row_id(row) in merged:
            nodes = tuple(node for member in row for node in member.nodes())
            yield Visible(row_id(row), nodes, tuple(row), folded=True)
        else:
            for child in map(_innermost, row):
                yield from _boxes(child, expanded, merged)


def _boxes(scope: Scope, expanded: frozenset[str], merged: AbstractSet[str]) -> Iterator[Visible]:
    """Yields a collapsed scope's box, or an expanded scope's own node and its children."""
    if not scope.children or scope.id not in expanded:
        yield Visible(scope.id, tuple(scope.nodes()), (scope,), folded=bool(scope.children))
        return
    if scope.own is not None:
        alone = Scope(scope.id, scope.name, scope.own, order=scope.own.order, size=1)
        yield Visible(scope.id, (scope.own,), (alone,), folded=False)
    yield from _children(scope, expanded, merged)


def _innermost(scope: Scope) -> Scope:
    """Returns the scope to draw, skipping scopes that only wrap a single other scope."""
    while scope.own is None and len(scope.ranked) == 1:
        scope = scope.ranked[0]
    return scope


def _closed_rows(scope: Scope, expanded: frozenset[str]) -> Iterator[list[Scope]]:
    """Yields the visible rows of identical collapsed scopes that are not expanded themselves."""
    for row in _rows(scope, expanded):
        if len(row) >= SHORTEST_ROW and row_id(row) not in expanded:
            yield row
        for child in map(_innermost, row):
            if child.id in expanded:
                yield from _closed_rows(child, expanded)


def _rows(scope: Scope, expanded: frozenset[str]) -> Iterator[list[Scope]]:
    """Yields a scope's children; identical collapsed neighbours are combined in one row."""
    row: list[Scope] = []
    for child in scope.ranked:
        if row and _same(row[-1], child, expanded):
            row.append(child)
            continue
        if row:
            yield row
        row = [child]
    if row:
        yield row


def _same(one: Scope, other: Scope, expanded: frozenset[str]) -> bool:
    """Returns whether two neighbours may share a box: numbered blocks with the same structure.

    Query and key projections also have the same structure, but they are not repeated blocks.
    """
    if not one.children or one.shape != other.shape:
        return False
    stem = one.name.rstrip("0123456789")
    numbered = one.name != stem and other.name.rstrip("0123456789") == stem != other.name
    return numbered and not {_innermost(one).id, _innermost(other).id} & expanded


def row_id(row: Sequence[Scope]) -> str:
    """Returns the id of a row of identical scopes, `first..last`."""
    return f"{row[0].id}..{row[-1].name}"


def default_expansion(nodes: Iterable[GraphNode], *, limit: int = 60) -> frozenset[str]:
    """Returns the scopes to expand at first, so that at most about `limit` boxes are visible.

    Expands the tree level by level. Scopes with the same structure are expanded together or not at
    all, so that a drawing never shows one of two identical blocks expanded and the other collapsed.

    Args:
        nodes: The nodes of the graph.
        limit: Maximum number of boxes, if the top level allows it.
    """
    root, expanded = scope_tree(nodes), frozenset[str]()
    rows: set[str] = set()
    level = _closed_below([root])
    while level:
        for twins in level:
            opened = expanded | {scope.id for scope in twins}
            boxes = visible_boxes(root, opened, limit)
            shared = {box.id for box in boxes if len(box.scopes) > 1}
            if len(boxes) <= limit and _all_below(shared - rows, twins):
                expanded, rows = opened, shared
        level = _closed_below([s for twins in level for s in twins if s.id in expanded])
    return expanded


def _all_below(rows: Iterable[str], scopes: Sequence[Scope]) -> bool:
    """Returns whether every row lies in one of the scopes, so that nothing else was merged."""
    return all(any(row.startswith(f"{scope.id}.") for scope in scopes) for row in rows)


def _closed_below(scopes: Iterable[Scope]) -> list[list[Scope]]:
    """Returns the scopes directly below `scopes`, grouped by shape."""
    twins: dict[int, list[Scope]] = {}
    for child in (_innermost(child) for scope in scopes for child in scope.ranked):
        if child.children:
            twins.setdefault(child.shape, []).append(child)
    return list(twins.values())


def expansion_for(name: str, expanded: frozenset[str]) -> frozenset[str]:
    """Returns `expanded` plus every scope that hides the node `name`."""
    parts = name.split(".")
    return expanded | {".".join(parts[:depth]) for depth in range(1, len(parts))}


def closed(scope: str, expanded: frozenset[str]) -> frozenset[str]:
    """Returns `expanded` without `scope` and everything below it."""
    below, row = f"{scope}.", f"{scope}.."  # a row that starts at this scope is a sibling
    return frozenset(
        s for s in expanded if s != scope and (not s.startswith(below) or s.startswith(row))
    )
