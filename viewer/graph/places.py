"""Positions and sizes of the boxes, given sorted columns."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import east_asian_width

from comgra_decl.viewer.graph.model import SOURCE_KINDS

MARGIN = 36.0  # room for edges that go around boxes
COLUMN_GAP = 40.0
ROW_GAP = 11.0
BOX_HEIGHT = 36.0
SOURCE_HEIGHT = 26.0  # sources are drawn smaller than computed nodes
MIN_WIDTH, MAX_WIDTH = 62.0, 196.0
FONT_SIZE, PADDING = 12.0, 24.0  # of a label; the browser squeezes or shortens wider labels

# Widths in hundredths of the font size, for the widest common sans-serif font (DejaVu Sans; Verdana
# is similar). Labels that fit in this font also fit in Roboto and Arial.
_GLYPHS = {
    32: " ',.Iijl|/\\",
    40: '!"()-:;[]frt',
    54: "*?_`csz",
    62: "aeghknopqubdvxyFLPTYESBZ",
    70: "ACKRVX",
    79: "DGHNOQUw&",
    99: "mMW@%",
    84: "#+<=>^~",
}
_WIDTHS = {glyph: width for width, glyphs in _GLYPHS.items() for glyph in glyphs}
_OTHER, _FULL = 64, 100  # digits and other scripts; Chinese, Japanese and Korean

Size = tuple[float, float]
Rect = tuple[float, float, float, float]


def box_size(label: str, kind: str, badge: str) -> Size:
    """Returns the width and height of a box with a label and an optional badge."""
    text = text_width(label) + (text_width(badge) + 8 if badge else 0)
    width = min(MAX_WIDTH, max(MIN_WIDTH, text + PADDING))
    return float(round(width)), SOURCE_HEIGHT if kind in SOURCE_KINDS else BOX_HEIGHT


def text_width(text: str) -> float:
    """Returns the width of a label in the widest common font."""
    return sum(map(_glyph_width, text)) * FONT_SIZE / 100


def _glyph_width(glyph: str) -> int:
    known = _WIDTHS.get(glyph)
    if known is not None:
        return known
    return _FULL if east_asian_width(glyph) in "WF" else _OTHER


def place(
    grid: Sequence[Sequence[int]],
    sizes: Sequence[Size],
    rank: Sequence[int],
    after: Sequence[Sequence[int]],
) -> list[Rect]:
    """Returns `(x, y, width, height)` of each box; the drawing starts `MARGIN` from the axes.

    Computed boxes are centred on one line, so that a chain of layers is straight. Sources are
    placed above and below, on the side of their consumers.

    Args:
        grid: Box numbers of each column, from top to bottom.
        sizes: Width and height of each box.
        rank: Distance class of each box; the boxes with the lowest rank in a column are on the
            line.
        after: Consumers of each box.
    """
    middle = [0.0] * len(sizes)  # middle of each box, relative to the centre line
    for rows in reversed(grid):  # place consumers before their sources
        _stack(rows, sizes, rank, after, middle)
    top = min((y - size[1] / 2 for y, size in zip(middle, sizes, strict=True)), default=0.0)
    rects, x = [(0.0, 0.0, 0.0, 0.0)] * len(sizes), MARGIN
    for rows in grid:
        column = max((sizes[i][0] for i in rows), default=0.0)
        for i in rows:
            width, height = sizes[i]
            y = MARGIN + middle[i] - height / 2 - top
            rects[i] = (x + (column - width) / 2, y, width, height)
        x += column + COLUMN_GAP
    return rects


def _stack(
    rows: Sequence[int],
    sizes: Sequence[Size],
    rank: Sequence[int],
    after: Sequence[Sequence[int]],
    middle: list[float],
) -> None:
    """Stores the vertical middles of one column."""
    lowest = min(rank[i] for i in rows)
    spine = [i for i in rows if rank[i] == lowest]
    above: list[int] = []
    below: list[int] = []
    for i in (i for i in rows if rank[i] > lowest):
        pull = sum(middle[v] for v in after[i])
        up = pull < 0 or (pull == 0 and len(above) < len(below))
        (above if up else below).append(i)
    extent = sum(sizes[i][1] for i in spine) + ROW_GAP * (len(spine) - 1)
    y = -extent / 2 - sum(sizes[i][1] + ROW_GAP for i in above)
    for i in (*above, *spine, *below):
        middle[i] = y + sizes[i][1] / 2
        y += sizes[i][1] + ROW_GAP
