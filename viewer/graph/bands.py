"""Brackets above the columns that label the expanded scope of each box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from comgra_decl.viewer.graph.folding import Opened
from comgra_decl.viewer.graph.model import CONSTANT_KINDS, Band, Box

Span = tuple[float, float]


def bands(scopes: Iterable[Opened], boxes: Sequence[Box]) -> tuple[Band, ...]:
    """Return the brackets of each scope, one for each row of the drawing in which it has boxes."""
    scopes = list(scopes)
    rows: dict[int, list[Box]] = {}
    for box in boxes:
        rows.setdefault(box.row, []).append(box)
    return tuple(band for row in sorted(rows) for band in _bands_of_row(scopes, rows[row], row))


def _bands_of_row(scopes: Sequence[Opened], boxes: Sequence[Box], row: int) -> list[Band]:
    """Return the bracket of each scope, in the first free line below its parent's bracket.

    A bracket spans the boxes that its scope computes. It also covers the scope's parameters, one
    column to the left of their consumer, unless that column belongs to a neighbour.
    """
    wanted = {inner.id for scope in scopes for inner in scope.scopes}
    full = _spans(wanted, boxes)
    core = _spans(wanted, [box for box in boxes if box.kind not in CONSTANT_KINDS])
    rows: list[list[Span]] = []  # occupied spans per line
    levels: dict[str, int] = {}
    found: list[Band] = []
    for scope in scopes:
        here = [inner.id for inner in scope.scopes if inner.id in full]
        if not here:
            continue
        whole = _union(full[name] for name in here)
        heart = _union(core.get(name, full[name]) for name in here)
        level = _free_row(rows, heart, levels.get(scope.parent, -1) + 1)
        left = max([whole[0], *(b for _, b in rows[level] if b <= heart[0])])
        right = min([whole[1], *(a for a, _ in rows[level] if a >= heart[1])])
        rows[level].append((left, right))
        levels[scope.id] = level
        found.append(Band(scope.id, scope.label, level, left, right - left, row))
    return found


def _free_row(rows: list[list[Span]], span: Span, level: int) -> int:
    """Return the first row from `level` on without overlap; adds a row if necessary."""
    while level < len(rows) and any(a < span[1] and span[0] < b for a, b in rows[level]):
        level += 1
    rows.extend([] for _ in range(level + 1 - len(rows)))
    return level


def _spans(scopes: AbstractSet[str], boxes: Iterable[Box]) -> dict[str, Span]:
    """Return the left and right ends of each scope's boxes."""
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
    """Return the smallest span that contains all spans."""
    lefts, rights = zip(*spans, strict=True)
    return min(lefts), max(rights)
