"""Brackets above the columns that label the expanded scope of each box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from comgra_decl.viewer.graph.folding import Opened
from comgra_decl.viewer.graph.model import CONSTANT_KINDS, Band, Box

Span = tuple[float, float]


def bands(scopes: Iterable[Opened], boxes: Sequence[Box]) -> tuple[Band, ...]:
    """Returns the bracket of each scope, in the first free row below its parent's bracket.

    A bracket spans the boxes that its scope computes. It also covers the scope's parameters, one
    column to the left of their consumer, unless that column belongs to a neighbour.
    """
    scopes = list(scopes)
    wanted = {inner.id for scope in scopes for inner in scope.scopes}
    full = _spans(wanted, boxes)
    core = _spans(wanted, [box for box in boxes if box.kind not in CONSTANT_KINDS])
    rows: list[list[Span]] = []  # occupied spans per row
    levels: dict[str, int] = {}
    found: list[Band] = []
    for scope in scopes:
        whole = _union(full[inner.id] for inner in scope.scopes)
        heart = _union(core.get(inner.id, full[inner.id]) for inner in scope.scopes)
        level = _free_row(rows, heart, levels.get(scope.parent, -1) + 1)
        left = max([whole[0], *(b for _, b in rows[level] if b <= heart[0])])
        right = min([whole[1], *(a for a, _ in rows[level] if a >= heart[1])])
        rows[level].append((left, right))
        levels[scope.id] = level
        found.append(Band(scope.id, scope.label, level, left, right - left))
    return tuple(found)


def _free_row(rows: list[list[Span]], span: Span, level: int) -> int:
    """Returns the first row from `level` on without overlap; adds a row if necessary."""
    while level < len(rows) and any(a < span[1] and span[0] < b for a, b in rows[level]):
        level += 1
    rows.extend([] for _ in range(level + 1 - len(rows)))
    return level


def _spans(scopes: AbstractSet[str], boxes: Iterable[Box]) -> dict[str, Span]:
    """Returns the left and right end of each scope's boxes."""
    spans: dict[str, Span] = {}
    for box in boxes if scopes else ():
        left, right = box.x, box.x + box.w
        for name in (box.id, *box.members) if box.repeat > 1 else (box.id,):
            while name:
                if name in scopes:
                    known = spans.get(name, (left, right))
                    spans[name] = min(known[0], left), max(known[1], right)
                name = name.rpartition(".")[0]
    return spans


def _union(spans: Iterable[Span]) -> Span:
    """Returns the smallest span that contains all spans."""
    lefts, rights = zip(*spans, strict=True)
    return min(lefts), max(rights)
