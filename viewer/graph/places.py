"""Positions and sizes of the boxes, given sorted columns; wraps long drawings into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from unicodedata import east_asian_width

from comgra_decl.viewer.graph.model import SOURCE_KINDS, Room

MARGIN = 20.0  # room for edges that go around boxes
COLUMN_GAP = 30.0
ROW_GAP = 11.0
GUTTER = 24.0  # between rows of a wrapped drawing, for edges
BAND = 23.0  # and for each line of bands
DETOUR = 6.0  # between bands and boxes, for edges that go around boxes
_MOST_ROWS = 12
_WORTH = 1.06  # how much larger a drawing must become to justify another row
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
    """Return the width and height of a box with a label and an optional badge."""
    text = text_width(label) + (text_width(badge) + 8 if badge else 0)
    width = min(MAX_WIDTH, max(MIN_WIDTH, text + PADDING))
    return float(round(width)), SOURCE_HEIGHT if kind in SOURCE_KINDS else BOX_HEIGHT


def text_width(text: str) -> float:
    """Return the width of a label in the widest common font."""
    return sum(map(_glyph_width, text)) * FONT_SIZE / 100


def cut(text: str, room: float) -> str:
    """Return a label without its middle if it is wider than `room`."""
    if text_width(text) <= room:
        return text
    head, tail = -(-len(text) // 2), len(text) // 2
    while head + tail > 2 and text_width(f"{text[:head]}\u2026{text[-tail:]}") > room:
        head, tail = (head - 1, tail) if head > tail else (head, tail - 1)
    return f"{text[:head]}\u2026{text[len(text) - tail :]}"


def _glyph_width(glyph: str) -> int:
    known = _WIDTHS.get(glyph)
    if known is not None:
        return known
    return _FULL if east_asian_width(glyph) in "WF" else _OTHER


@dataclass(frozen=True)
class Lines:
    """The columns of a drawing, not yet wrapped: distances are relative to a centre line.

    Attributes:
        grid: Box numbers of each column, from top to bottom.
        sizes: Width and height of each box.
        middle: Middle of each box, below the centre line.
    """

    grid: Sequence[Sequence[int]]
    sizes: Sequence[Size]
    middle: Sequence[float]

    def width(self, column: int) -> float:
        """Return the width of a column."""
        return max((self.sizes[i][0] for i in self.grid[column]), default=0.0)

    def reach(self, columns: Iterable[int]) -> tuple[float, float]:
        """Return how far the boxes of some columns reach above and below the centre line."""
        boxes = [i for column in columns for i in self.grid[column]]
        above = max((self.sizes[i][1] / 2 - self.middle[i] for i in boxes), default=0.0)
        below = max((self.sizes[i][1] / 2 + self.middle[i] for i in boxes), default=0.0)
        return above, below


def lines(
    grid: Sequence[Sequence[int]],
    sizes: Sequence[Size],
    rank: Sequence[int],
    after: Sequence[Sequence[int]],
) -> Lines:
    """Return the columns with the height of each box.

    Computed boxes are centred on one line, so that a chain of layers is straight. Sources are
    placed above and below, on the side of their consumers.

    Args:
        grid: Box numbers of each column, from top to bottom.
        sizes: Width and height of each box.
        rank: Distance class of each box; the boxes with the lowest rank in a column are on the
            line.
        after: Consumers of each box.
    """
    middle = [0.0] * len(sizes)
    for rows in reversed(grid):  # place consumers before their sources
        _stack(rows, sizes, rank, after, middle)
    return Lines(grid, sizes, middle)


def wrapped(
    drawn: Lines, links: Iterable[tuple[int, int]], room: Room | None, heads: int
) -> list[range]:
    """Return the columns of each row of the drawing: as many rows as make it largest.

    Rows end where few edges cross.

    Args:
        drawn: The columns.
        links: Edges between boxes.
        room: Size of the drawing area; None for a single row.
        heads: Lines of bands above each row.
    """
    count = len(drawn.grid)
    best = [range(count)]
    if room is None or count < 2:
        return best
    ends = list(accumulate(drawn.width(column) + COLUMN_GAP for column in range(count)))
    crossing = _crossing(drawn, links)
    zoom = room.zoom(*_extent(drawn, best, heads))
    for rows in range(2, min(_MOST_ROWS, count) + 1):
        tried = _cut(ends, crossing, ends[-1] / rows)
        larger = room.zoom(*_extent(drawn, tried, heads))
        if larger > zoom * _WORTH:
            best, zoom = tried, larger
    return best


def _extent(drawn: Lines, rows: Sequence[range], heads: int) -> Size:
    """Return the width and height of a drawing in these rows."""
    wide = [sum(drawn.width(column) + COLUMN_GAP for column in row) for row in rows]
    high = [sum(drawn.reach(row)) for row in rows]
    gaps = 0.0
    if len(rows) > 1:
        gaps = len(rows) * (heads * BAND + DETOUR) + (len(rows) - 1) * GUTTER
    return max(wide) - COLUMN_GAP + 2 * MARGIN, sum(high) + gaps + 2 * MARGIN


def _crossing(drawn: Lines, links: Iterable[tuple[int, int]]) -> list[int]:
    """Return the number of edges that cross the right side of each column."""
    column = {i: number for number, rows in enumerate(drawn.grid) for i in rows}
    change = [0] * (len(drawn.grid) + 1)
    for source, sink in links:
        left, right = sorted((column[source], column[sink]))
        change[left] += 1
        change[right] -= 1
    return list(accumulate(change))


def _cut(ends: Sequence[float], crossing: Sequence[int], width: float) -> list[range]:
    """Return rows of about equal width; each ends at the best column of its last third."""
    rows: list[range] = []
    first, start = 0, 0.0
    while first < len(ends):
        limit = start + width * 1.08
        last = first
        while last + 1 < len(ends) and ends[last + 1] <= limit:
            last += 1
        if last + 1 < len(ends):
            late = [c for c in range(first, last + 1) if ends[c] - start >= width * 0.7] or [last]
            last = min(reversed(late), key=lambda column: crossing[column])
        rows.append(range(first, last + 1))
        first, start = last + 1, ends[last]
    return rows


def spread(drawn: Lines, rows: Sequence[range]) -> list[Rect]:
    """Return `(x, y, width, height)` of each box, with y below the centre line of its row."""
    rects = [(0.0, 0.0, 0.0, 0.0)] * len(drawn.sizes)
    for row in rows:
        x = MARGIN
        for column in row:
            whole = drawn.width(column)
            for i in drawn.grid[column]:
                width, height = drawn.sizes[i]
                rects[i] = (x + (whole - width) / 2, drawn.middle[i] - height / 2, width, height)
            x += whole + COLUMN_GAP
    return rects


def centres(drawn: Lines, rows: Sequence[range], heads: Callable[[int], int]) -> list[float]:
    """Return the centre line of each row, below its bands; `heads` counts a row's lines of bands.

    A drawing in a single row has its bands outside, at the upper edge of the drawing area.
    """
    found, y = [], MARGIN
    for number, row in enumerate(rows):
        above, below = drawn.reach(row)
        y += heads(number) * BAND + DETOUR if len(rows) > 1 else 0.0
        y += GUTTER if number else 0.0
        found.append(y + above)
        y += above + below
    return found


def _stack(
    rows: Sequence[int],
    sizes: Sequence[Size],
    rank: Sequence[int],
    after: Sequence[Sequence[int]],
    middle: list[float],
) -> None:
    """Store the vertical middles of one column."""
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
