"""The dependency graph as a HoloViews figure: edges, groups and boxes with their labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import holoviews as hv
import numpy as np
from bokeh.models import HoverTool

from comgra_decl.viewer.elements import literal, styled
from comgra_decl.viewer.graph.layout import Band, Box, Scene
from comgra_decl.viewer.graph.places import BAND, cut, text_width
from comgra_decl.viewer.graph.routes import routes
from comgra_decl.viewer.palette import GREY, INK, KINDS
from comgra_decl.visible import visible

GRAPH_SIZE = 1200, 700
"""Width and height of the area in which a graph can be read."""

_TITLE = 30
"""Height of the title above a graph."""

_UNKNOWN = "#8a93a626"
"""The fill of boxes without a value."""

_MANY = 500  # edges

_CORNERS = ["x", "y", "right", "bottom"]

Paint = Mapping[str, Mapping[str, Any]]
"""Colour and text of each box, as `painted` returns them."""


def graph_figure(
    scene: Scene,
    paint: Paint | None,
    title: str,
    *,
    values: Mapping[str, Mapping[str, float | None]] | None = None,
    flow: Sequence[Mapping[str, Any]] = (),
) -> hv.Overlay:
    """Return a drawing of the graph, with the colours of `painted` or those of the kinds.

    Args:
        scene: the drawing.
        paint: colour and text of each box; None for the colours of the kinds.
        title: the title.
        values: a statistic, and its value in each box.
        flow: ends, width and colour of each edge that is emphasised.
    """
    more = values or {}
    rows = [_row(box, paint, more) for box in scene.boxes]
    names = [
        (box.x + box.w / 2, box.y + box.h / 2, _fitting(box, row[6]), _ink(row[7]))
        for box, row in zip(scene.boxes, rows, strict=True)
    ]
    heads = [
        (band.x + band.w / 2, _height(scene, band, 0.4), cut(visible(band.label), band.w), INK)
        for band in scene.bands
    ]
    whole = _edges(scene, flow) * _brackets(scene) * _paper(heads) * _boxes(rows, [*more])
    whole = whole * styled(
        hv.Labels([*names, *heads], kdims=["x", "y"], vdims=["text", "colour"]),
        "Labels", {},
        bokeh={"text_color": "colour", "text_font_size": "11px"},
        matplotlib={"color": "colour", "size": 7.5},
    )  # fmt: skip
    width, height = round(scene.width), round(scene.height) + _TITLE
    look = {
        "title": visible(title), "fontsize": {"title": 10}, "xaxis": None, "yaxis": None,
        "invert_yaxis": True, "show_frame": False,
        "xlim": (0, scene.width), "ylim": (0, scene.height),
    }  # fmt: skip
    size = {"width": width, "height": height, "hooks": [literal]}
    whole = whole.opts(hv.opts.Overlay(**look, **size, backend="bokeh"))
    if "matplotlib" in hv.Store.renderers:
        size = {"fig_inches": (width / 72, height / 72), "aspect": "equal"}
        whole = whole.opts(hv.opts.Overlay(**look, **size, backend="matplotlib"))
    return whole


def _edges(scene: Scene, flow: Sequence[Mapping[str, Any]]) -> hv.Overlay:
    """Return the edges; those without a gradient are dashed, and emphasised ones above them."""
    ways: dict[bool, list[Any]] = {True: [], False: []}
    lines = {}
    for (source, sink, gradient), line in zip(scene.edges, routes(scene), strict=True):
        ways[gradient].append(line)
        lines[source, sink] = line
    paths = [
        _path(ways[gradient], GREY, 1.0, dash)
        for gradient, dash in ((True, "solid"), (False, "dashed"))
    ]
    for each in flow:
        source, sink = each["edge"]
        if (source, sink) in lines:
            paths.append(_path([lines[source, sink]], each["color"], each["width"], "solid"))
    return hv.Overlay(paths)


def _path(lines: Sequence[Any], colour: str, width: float, dash: str) -> hv.Path:
    if len(lines) > _MANY:  # HoloViews needs a millisecond for each element of a list
        gap = np.full((1, 2), np.nan)
        lines = [np.concatenate([part for line in lines for part in (np.asarray(line), gap)])]
    return styled(
        hv.Path(lines, kdims=["x", "y"]), "Path", {"color": colour},
        bokeh={"line_width": width, "line_dash": dash},
        matplotlib={"linewidth": 0.8 * width, "linestyle": dash},
    )  # fmt: skip


def _brackets(scene: Scene) -> hv.Segments:
    spans = [
        (band.x, y, band.x + band.w, y) for band in scene.bands for y in [_height(scene, band, 0.9)]
    ]
    return styled(
        hv.Segments(spans, kdims=_CORNERS),
        "Segments", {"color": GREY}, bokeh={"line_width": 1}, matplotlib={"linewidth": 0.8},
    )  # fmt: skip


def _paper(heads: Sequence[tuple[float, float, str, str]]) -> hv.Rectangles:
    """Return a background for the names of groups, so that edges do not cross them."""
    areas = [
        (x - w / 2, y - 8, x + w / 2, y + 8) for x, y, name, _ in heads for w in [text_width(name)]
    ]
    return styled(
        hv.Rectangles(areas, kdims=_CORNERS), "Rectangles", {},
        bokeh={"color": "#ffffff", "line_alpha": 0, "alpha": 0.85},
        matplotlib={"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


def _row(
    box: Box, paint: Paint | None, values: Mapping[str, Mapping[str, float | None]]
) -> tuple[Any, ...]:
    """Return a row of the table of boxes; see `_boxes`."""
    mine = None if paint is None else paint.get(box.id)
    fill = _UNKNOWN if paint is not None else f"{KINDS[box.kind]}38"
    text = "" if mine is None else mine["text"]
    corners = (box.x, box.y, box.x + box.w, box.y + box.h)
    colours = fill if mine is None else mine["fill"], KINDS[box.kind]
    numbers = [math.nan if (v := each[box.id]) is None else v for each in values.values()]
    return (*corners, visible(box.id), box.kind, text, *colours, *numbers)


def _boxes(rows: Sequence[tuple[Any, ...]], statistics: Sequence[str]) -> hv.Rectangles:
    hover = HoverTool(tooltips=[("", "@box"), ("kind", "@kind"), ("value", "@shown")])
    dims = ["box", "kind", "shown", "fill", "edge", *statistics]
    return styled(
        hv.Rectangles(rows, kdims=_CORNERS, vdims=dims), "Rectangles", {},
        bokeh={"color": "fill", "line_color": "edge", "tools": [hover]},
        matplotlib={"facecolor": "fill", "edgecolor": "edge", "linewidth": 1},
    )  # fmt: skip


def _height(scene: Scene, band: Band, below: float) -> float:
    """Return a height in the line of a band, `below` its upper edge as a share of the line."""
    highest = max(each.level for each in scene.bands if each.row == band.row)
    return scene.rows[band.row][0] - BAND * (highest - band.level + 1 - below)


def _fitting(box: Box, text: str) -> str:
    """Return the label of a box, with its number of members and its value."""
    count = f" \u00d7{box.repeat}" if box.repeat > 1 else ""
    if box.folded and not box.plain and box.repeat == 1:
        count = f" ({box.count})"
    label = cut(visible(box.label), box.w - 8 - text_width(count)) + count
    return f"{label}\n{text}" if text else label


def _ink(fill: str) -> str:
    """Return black or white, whichever has more contrast with a fill; black if it is faint."""
    if len(fill) > len("#rrggbb"):
        return "#1c2230"
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#1c2230" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
