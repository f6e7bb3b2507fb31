"""Folds the graph by module scope: decides which nodes get their own box and which share one.

A scope is a proper dotted prefix of a node's name. A collapsed scope is one box. The node of a
module (`blocks.0`) and the scope of the same name share that box; once the scope is expanded, the
node gets its own box next to its children. Quiet modules belong to the scope of their neighbour,
see `quiet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from comgra_decl.viewer.graph.model import GraphNode
from comgra_decl.viewer.graph.quiet import Edges, hosts, owned

#: Minimum number of identical blocks that may share a box.
SHORTEST_ROW = 3

#: Number of boxes from which a drawing shows enough of a network.
_ENOUGH = 12


@dataclass(eq=False)
class Scope:
    """A name in the module tree: its own node, if any, and the names below it.

    `small` is True for a quiet module and for a parameter that only its own module reads. `nodes`
    are the scope's own node, then the nodes below it in execution order.
    """

    id: str
    name: str
    own: GraphNode | None = None
    children: dict[str, Scope] = field(default_factory=dict)
    order: int = 0
    size: int = 0
    shape: int = 0  # equal for scopes with the same structure
    ranked: list[Scope] = field(default_factory=list)  # children by first execution
    small: bool = False
    nodes: tuple[GraphNode, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the scope is a single module that contains only small parts."""
        return self.own is not None and all(child.small for child in self.ranked)


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


def scope_tree(nodes: Sequence[GraphNode], edges: Edges = ()) -> Scope:
    """Return the root of the module tree; if names are equal, the first node is used."""
    root = Scope("", "")
    found: dict[str, tuple[Scope, Scope]] = {}  # each scope and its parent
    for node in nodes:
        scope, path = root, ""
        for part in node.name.split("."):
            path = f"{path}.{part}" if scope is not root else part
            if part not in scope.children:
                scope.children[part] = Scope(path, part)
                found[path] = scope.children[part], scope
            scope = scope.children[part]
        scope.own = scope.own or node
    for name in owned(nodes, edges):
        found[name][0].small = not found[name][0].children
    for name, host in hosts(nodes, edges).items():
        quiet, parent = found[name]
        del parent.children[quiet.name]
        quiet.small = True
        found[host][0].children[f".{name}"] = quiet  # no part of a name contains a dot
    _measure(root, {})
    return root


def _measure(scope: Scope, shapes: dict[object, int]) -> None:
    """Compute nodes, order, size and shape bottom-up."""
    for child in scope.children.values():
        _measure(child, shapes)
    scope.ranked = sorted(scope.children.values(), key=lambda child: (child.order, child.id))
    looks, own = None, scope.own
    scope.nodes = () if own is None else (own,)
    scope.nodes += tuple(node for child in scope.ranked for node in child.nodes)
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
    """Return the boxes to draw.

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
    """Yield the expanded visible scopes, outer ones first."""
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
    """Yield the boxes below an expanded scope; `merged` names rows that share one box."""
    for row in _rows(scope, expanded) if merged else ([child] for child in scope.ranked):
        if len(row) > 1 and row_id(row) in merged:
            nodes = tuple(node for member in row for node in member.nodes)
            yield Visible(row_id(row), nodes, tuple(row), folded=True)
        else:
            for child in map(_innermost, row):
                yield from _boxes(child, expanded, merged)


def _boxes(scope: Scope, expanded: frozenset[str], merged: AbstractSet[str]) -> Iterator[Visible]:
    """Yield a collapsed scope's box, or an expanded scope's own node and its children."""
    if not scope.children or scope.id not in expanded:
        yield Visible(scope.id, scope.nodes, (scope,), folded=bool(scope.children))
        return
    if scope.own is not None:
        alone = Scope(scope.id, scope.name, scope.own, order=scope.own.order, size=1)
        yield Visible(scope.id, (scope.own,), (alone,), folded=False)
    yield from _children(scope, expanded, merged)


def _innermost(scope: Scope) -> Scope:
    """Return the scope to draw, skipping scopes that only wrap a single other scope."""
    while scope.own is None and len(scope.ranked) == 1:
        scope = scope.ranked[0]
    return scope


def _closed_rows(scope: Scope, expanded: frozenset[str]) -> Iterator[list[Scope]]:
    """Yield the visible rows of identical collapsed scopes that are not expanded themselves."""
    for row in _rows(scope, expanded):
        if len(row) >= SHORTEST_ROW and row_id(row) not in expanded:
            yield row
        for child in map(_innermost, row):
            if child.id in expanded:
                yield from _closed_rows(child, expanded)


def _rows(scope: Scope, expanded: frozenset[str]) -> Iterator[list[Scope]]:
    """Yield a scope's children; identical collapsed neighbours are combined in one row."""
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
    """Return whether two neighbours may share a box: numbered blocks with the same structure.

    Query and key projections also have the same structure, but they are not repeated blocks.
    """
    if not one.children or one.shape != other.shape:
        return False
    stem = one.name.rstrip("0123456789")
    numbered = one.name != stem and other.name.rstrip("0123456789") == stem != other.name
    return numbered and not {_innermost(one).id, _innermost(other).id} & expanded


def row_id(row: Sequence[Scope]) -> str:
    """Return the id of a row of identical scopes, `first..last`."""
    return f"{row[0].id}..{row[-1].name}"


@dataclass(frozen=True)
class Folding:
    """What a drawing shows: the expanded scopes, and the number of boxes above which rows merge."""

    expanded: frozenset[str]
    limit: int


def first_folding(root: Scope, limit: int, fits: Callable[[Folding], bool]) -> Folding:
    """Return the folding of the first view, which expands whole levels while they are readable.

    A level is expanded if the drawing shows little without it. Below that, only stacks of
    identical blocks are expanded, to show the blocks. If there are too many blocks, they share a
    box.
    Parameters stay with their module.

    Args:
        root: The module tree.
        limit: See `visible_boxes`.
        fits: Returns whether a drawing can be read.
    """
    best = Folding(frozenset(), limit)
    rows = _shared(visible_boxes(root, best.expanded, limit))
    level = _closed_below([root])
    while level:
        few = len(visible_boxes(root, best.expanded, best.limit)) < _ENOUGH
        wanted = level if few else [scope for scope in level if _is_stack(scope)]
        opened = best.expanded | {scope.id for scope in wanted}
        count = len(visible_boxes(root, opened, best.limit))
        for most in (best.limit, count - 1):
            shared = _shared(visible_boxes(root, opened, most))
            tried = Folding(opened, most)
            if wanted and _all_below(shared - rows, wanted) and fits(tried):
                break
        else:
            break
        best, rows, level = tried, shared, _closed_below(wanted)
    return best


def _shared(boxes: Iterable[Visible]) -> set[str]:
    """Return the boxes shared by several blocks."""
    return {box.id for box in boxes if len(box.scopes) > 1}


def _is_stack(scope: Scope) -> bool:
    """Return whether a scope consists of blocks, of which many are identical."""
    return any(len(row) >= SHORTEST_ROW for row in _rows(scope, frozenset()))


def _all_below(rows: Iterable[str], scopes: Sequence[Scope]) -> bool:
    """Return whether every row lies in one of the scopes, so that nothing else was merged."""
    return all(any(row.startswith(f"{scope.id}.") for scope in scopes) for row in rows)


def _closed_below(scopes: Iterable[Scope]) -> list[Scope]:
    """Return the scopes directly below `scopes` that hide more than parameters."""
    below = (_innermost(child) for scope in scopes for child in scope.ranked)
    return [child for child in below if child.children and not child.plain]


def expansion_for(name: str, expanded: frozenset[str]) -> frozenset[str]:
    """Return `expanded` plus every scope that hides the node `name`."""
    parts = name.split(".")
    return expanded | {".".join(parts[:depth]) for depth in range(1, len(parts))}


def closed(scope: str, expanded: frozenset[str]) -> frozenset[str]:
    """Return `expanded` without `scope` and everything below it."""
    below, row = f"{scope}.", f"{scope}.."  # a row that starts at this scope is a sibling
    return frozenset(
        s for s in expanded if s != scope and (not s.startswith(below) or s.startswith(row))
    )
