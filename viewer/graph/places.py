"""Where the boxes of sorted columns stand and how large they are."""

from __future__ import annotations

from collections.abc import Sequence

from comgra_decl.viewer.graph.model import SOURCE_KINDS

MARGIN = 24.0
COLUMN_GAP = 40.0
ROW_GAP = 12.0
BOX_HEIGHT = 36.0
SOURCE_HEIGHT = 28.0  # what feeds a node is drawn smaller than what it computes
MIN_WIDTH, MAX_WIDTH = 64.0, 196.0
CHARACTER, PADDING = 6.9, 30.0  # of a 12 px sans-serif label, and room for its badge


Rect = tuple[float, float, float, float]


def place(
    grid: Sequence[Sequence[int]],
    kinds: Sequence[str],
    labels: Sequence[str],
    after: Sequence[Sequence[int]],
) -> list[Rect]:
    """Returns `(x, y, width, height)` of each box, all within `MARGIN` of the origin's axes.

    What a column computes is centred on one line, so that a chain of layers is drawn straight;
    parameters and other sources stand above and below it, on the side of their consumers.

    Args:
        grid: Box numbers of each column, from top to bottom.
        kinds: Kind of each box.
        labels: Label of each box, sets its width.
        after: The boxes that consume each box.
    """
    size = len(kinds)
    middle = [0.0] * size  # of each box, relative to the common centre line
    widths = [min(MAX_WIDTH, max(MIN_WIDTH, len(label) * CHARACTER + PADDING)) for label in labels]
    heights = [SOURCE_HEIGHT if kind in SOURCE_KINDS else BOX_HEIGHT for kind in kinds]
    for rows in reversed(grid):  # consumers are placed before what feeds them
        _stack(rows, kinds, heights, after, middle)
    top = min((middle[i] - heights[i] / 2 for i in range(size)), default=0.0)
    rects, x = [(0.0, 0.0, 0.0, 0.0)] * size, MARGIN
    for rows in grid:
        column = max((widths[i] for i in rows), default=0.0)
        for i in rows:
            y = MARGIN + middle[i] - heights[i] / 2 - top
            rects[i] = (x + (column - widths[i]) / 2, y, widths[i], heights[i])
        x += column + COLUMN_GAP
    return rects


def _stack(
    rows: Sequence[int],
    kinds: Sequence[str],
    heights: Sequence[float],
    after: Sequence[Sequence[int]],
    middle: list[float],
) -> None:
    """Writes the vertical middles of one column."""
    spine = [i for i in rows if kinds[i] not in SOURCE_KINDS]
    above: list[int] = []
    below: list[int] = []
    if not spine:
        spine = list(rows)
    else:
        for i in (i for i in rows if kinds[i] in SOURCE_KINDS):
            pull = sum(middle[v] for v in after[i])
            up = pull < 0 or (pull == 0 and len(above) < len(below))
            (above if up else below).append(i)
    extent = sum(heights[i] for i in spine) + ROW_GAP * (len(spine) - 1)
    y = -extent / 2 - sum(heights[i] + ROW_GAP for i in above)
    for i in (*above, *spine, *below):
        middle[i] = y + heights[i] / 2
        y += heights[i] + ROW_GAP
