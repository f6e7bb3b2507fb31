"""Routes of the edges of a scene as polylines, for figures that are not drawn by a browser.

The browser derives the same routes from the scene (`graph_scene.js`), so that a scene stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.graph.model import Box, Scene

Line = NDArray[np.float64]
"""Points of an edge, [points, 2]."""

_LANE_NEAR = 150.0  # maximum detour of an edge around boxes
_BESIDE = 10.0  # distance of an edge between rows from its column and its row
_CURVE = np.linspace(0, 1, 17)[:, None]  # parameters at which a curve is evaluated


def routes(scene: Scene) -> Iterator[Line]:
    """Yield the points of each edge, in the order of `scene.edges`."""
    boxes = {box.id: box for box in scene.boxes}
    columns = _columns(scene.boxes)
    column_of = {box.id: i for i, column in enumerate(columns) for box in column}
    for source, sink, _ in scene.edges:
        a, b = boxes[source], boxes[sink]
        first, last = column_of[source], column_of[sink]
        start, end = (a.x + a.w, a.y + a.h / 2), (b.x, b.y + b.h / 2)
        if a.row != b.row:
            yield _wrapped(scene, a, b, columns, (first, last))
        elif last <= first:
            yield _loop(start, end, columns[last : first + 1])
        else:
            yield _forward(start, end, columns[first + 1 : last])


def _columns(boxes: Sequence[Box]) -> list[list[Box]]:
    """Return the boxes by column; the columns of the next row come after all columns of a row."""
    middles: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        middles.setdefault((box.row, int(box.x + box.w / 2 + 0.5)), []).append(box)
    return [sorted(middles[key], key=lambda box: box.y) for key in sorted(middles)]


def _forward(
    start: tuple[float, float], end: tuple[float, float], between: Sequence[Sequence[Box]]
) -> Line:
    lane = _lane(between, start[1], end[1]) if between else None
    if lane is None:
        return _curve(start, end)
    left = min(box.x for box in between[0]), lane
    right = max(box.x + box.w for box in between[-1]), lane
    return np.concatenate([_curve(start, left), _curve(right, end)])


def _lane(columns: Sequence[Sequence[Box]], y1: float, y2: float) -> float | None:
    """Return a height at which a horizontal line crosses no box; None if it is too far away."""
    boxes = [box for column in columns for box in column]
    away = 9 + 4 * min(6, len(columns))  # longer edges go around shorter ones
    top = min(box.y for box in boxes) - away
    bottom = max(box.y + box.h for box in boxes) + away
    for y in (y1, y2):
        if all(y < box.y - 5 or y > box.y + box.h + 5 for box in boxes):
            return y
    middle = (y1 + y2) / 2
    near = top if middle - top <= bottom - middle else bottom
    return near if abs(near - middle) <= _LANE_NEAR else None


def _wrapped(
    scene: Scene, a: Box, b: Box, columns: Sequence[Sequence[Box]], ends: tuple[int, int]
) -> Line:
    """Return an edge to another row: between the rows, and along the left margin past others."""
    first, last = ends
    apart = 2.0 * (first % 5)  # edges from different sources stay apart
    below = scene.rows[a.row][1] + _BESIDE + apart
    above = scene.rows[b.row - 1 if b.row > a.row else b.row][1] + _BESIDE + apart
    right = max(box.x + box.w for box in columns[first]) + _BESIDE
    left = min(box.x for box in columns[last]) - _BESIDE
    margin = 4 + apart / 2
    past = [] if below == above else [(margin, below), (margin, above)]
    y1, y2 = a.y + a.h / 2, b.y + b.h / 2
    corners = [(a.x + a.w, y1), (right, y1), (right, below), *past, (left, above), (left, y2)]
    return np.array([*corners, (b.x, y2)])


def _loop(
    start: tuple[float, float], end: tuple[float, float], columns: Sequence[Sequence[Box]]
) -> Line:
    """Return a backward edge (a recurrence), which runs below everything in between."""
    y = max(box.y + box.h for column in columns for box in column) + 14
    down = _bezier(start, (start[0] + 26, start[1]), (start[0] + 26, y), (start[0], y))
    up = _bezier((end[0], y), (end[0] - 26, y), (end[0] - 26, end[1]), end)
    return np.concatenate([down, up])


def _curve(start: tuple[float, float], end: tuple[float, float]) -> Line:
    d = max(8.0, (end[0] - start[0]) / 2)
    return _bezier(start, (start[0] + d, start[1]), (end[0] - d, end[1]), end)


def _bezier(*points: tuple[float, float]) -> Line:
    """Return points of a cubic Bezier curve."""
    a, b, c, d = (np.array(point) for point in points)
    t, s = _CURVE, 1 - _CURVE
    curve: Line = s**3 * a + 3 * s**2 * t * b + 3 * s * t**2 * c + t**3 * d
    return curve
