"""HoloViews elements with the look of the viewer, for `run.plot` and the like."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import holoviews as hv
import numpy as np
import pandas as pd
from bokeh.models import HoverTool
from numpy.typing import NDArray

from comgra_decl.viewer.escaping import bokeh_text
from comgra_decl.viewer.graph.places import cut, text_width
from comgra_decl.viewer.model.drawing import Drawing, limit_of, tile_ticks
from comgra_decl.viewer.model.graph import scale_of
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.runs import Scale
from comgra_decl.viewer.palette import (
    BLUE,
    INK,
    LINES,
    ORANGE,
    colour_at,
    faded,
    signed_faded,
)
from comgra_decl.viewer.style import LEGEND
from comgra_decl.visible import visible

LINE, HIGHEST = 14, 700
"""Pixels for the name of a row, and the largest height of an element with names."""

_LETTERS = 48
"""Number of letters that have room below an element."""

_HEIGHT, _WIDEST = 360, 900
"""Pixels of a picture: its height, and the width above which it is made smaller."""

_WORDS, _WORD = 700.0, 22
"""Pixels of a text: the width at which it is wrapped, and the height of a line."""

_DARK, _BLACK, _WHITE = 0.8, "#1d2433", "#ffffff"
"""Share of the scale above which white letters are easier to read, and the colours of letters."""

SHORT = "%.3g"
"""Format of the numbers of a colour bar; Matplotlib would write a power of ten over the title."""

_BESIDE = 4
"""Figures in a row."""

_TICKS = 12
"""Largest number of numbers along an axis of cells."""

_NUMBERS = 20
"""Largest number of tiles that are numbered along an axis."""

_LINES = 5
"""Largest number of steps with a line of their own."""

_HALF, _NAMED, _NAME = 0.3, 40, 150.0
"""Half the width of a box, the most boxes that all have names, and the pixels of a name."""

NAME_ROOM = 360.0
"""Pixels of a node's name in a title or beside an axis."""

_DENSE = 40
"""Number of bars above which they have no gaps."""

_FAINTEST = 0.02
"""Weight, relative to the largest of its head, below which there is no line."""

Floats = NDArray[np.float64]


def overlaid(curves: Mapping[Any, hv.Curve], dimension: str) -> hv.NdOverlay:
    """Return curves in one figure, keyed by a dimension."""
    lines = {key: as_lines(curve) for key, curve in curves.items()}
    overlay = hv.NdOverlay(lines, kdims=[dimension], sort=False)
    overlay = styled(overlay, "Curve", {"color": hv.Cycle(list(LINES))}, bokeh={"height": 300})
    return styled(overlay, "NdOverlay", {"legend_position": "right"}, bokeh={"height": 300})


def side_by_side(curves: Mapping[str, hv.Curve]) -> hv.Layout:
    """Return a small figure with its own axis for each curve, several in a row."""
    parts = []
    for title, curve in curves.items():
        look: dict[str, Any] = {"title": title, "color": BLUE}
        low, high = curve.range(1)
        if (
            low == high and np.isfinite(low) and low
        ):  # an axis from -1 to 1 would make it look like 0
            look["ylim"] = min(low / 2, low * 1.5), max(low / 2, low * 1.5)
        drawn = styled(
            as_lines(curve.relabel(title)),
            "Curve",
            look,
            bokeh={"width": 320, "height": 220, "responsive": False, "axiswise": True},
            matplotlib={"axiswise": True, "fontsize": {"title": 9, "labels": 8, "ticks": 7}},
        )
        parts.append(drawn)
    return beside(parts)


def beside(parts: Sequence[Any], *, across: int = _BESIDE) -> hv.Layout:
    """Return figures in rows of at most `across`, each with its own axes."""
    layout = hv.Layout([*parts]).cols(min(len(parts), across))
    if "matplotlib" in hv.Store.renderers:
        spaced: dict[str, Any] = {
            "sublabel_format": "",
            "fig_size": 90,
            "vspace": 0.5,
            "hspace": 0.4,
        }
        layout = layout.opts(hv.opts.Layout(**spaced, backend="matplotlib"))
    return layout.opts(hv.opts.Layout(shared_axes=False, backend="bokeh"))


def as_lines(curve: hv.Curve) -> hv.Curve:
    """Return a curve drawn as a line, with a marker for each point without neighbours."""
    return styled(
        curve, "Curve", {"hooks": [_mark_isolated]}, bokeh={"height": 300, "tools": ["hover"]}
    )


def banded(curves: Mapping[str, pd.DataFrame], value: str, title: str) -> hv.Overlay:
    """Return curves by step over bands from `value - error` to `value + error`.

    Args:
        curves: by label, tables with the columns "step", `value` and "error". Without finite
            errors, a curve has no band.
        value: the name of the values.
        title: the title.
    """
    bands, lines = [], []
    for (label, table), colour in zip(curves.items(), cycle(LINES), strict=False):
        ends = table.assign(low=table[value] - table["error"], high=table[value] + table["error"])
        known = ends[np.isfinite(ends["high"])]
        if len(known) > 1:
            band = hv.Area(known, "step", ["low", "high"], label=label)
            bands.append(
                styled(
                    band,
                    "Area",
                    {"color": colour, "alpha": 0.25},
                    bokeh={"line_color": None},
                    matplotlib={"facecolor": colour, "linewidth": 0},
                )
            )
        curve = as_lines(hv.Curve(table, "step", [value, "error"], label=label))
        lines.append(styled(curve, "Curve", {"color": colour}))
    look = {
        "title": title, "ylabel": value, "show_legend": len(lines) > 1, "legend_position": "right",
    }  # fmt: skip
    whole = hv.Overlay([*bands, *lines])
    return styled(whole, "Overlay", look, bokeh={"height": 300})


def stacked(
    table: pd.DataFrame, colours: Mapping[str, str], title: str, *, value: str
) -> hv.Overlay:
    """Return the parts of each row of a table as a bar, the first part at the bottom.

    Each part is an `hv.Area` with the dimensions `from`, `to` and `size`, and four points for each
    bar.

    Args:
        table: one row for each bar, whose index is its place; one column for each part.
        colours: the colour of each part.
        title: the title.
        value: the name of the values.
    """
    places, axis = table.index.to_numpy(np.float64), str(table.index.name)
    apart = float(np.diff(places).min()) if len(places) > 1 else 1.0
    half = (0.4 if len(places) <= _DENSE else 0.5) * apart
    sides = np.stack([places - half] * 2 + [places + half] * 2, axis=1).ravel()
    tops = table.cumsum(axis=1)
    areas = []
    for part, colour in colours.items():
        size, top = (each[part].to_numpy(np.float64)[:, None] for each in (table, tops))
        ends = ((np.array([0, 1, 1, 0]) * each).ravel() for each in (top - size, top, size))
        area = hv.Area((sides, *ends), axis, ["from", "to", "size"], label=visible(part))
        areas.append(
            styled(
                area, "Area", {"color": colour, "show_legend": True},
                bokeh={"line_color": None}, matplotlib={"facecolor": colour, "linewidth": 0},
            )
        )  # fmt: skip
    look: dict[str, Any] = {
        "title": title, "xlabel": axis, "ylabel": value, "show_legend": True,
        "legend_position": "right", "ylim": (0, 1.05 * float(table.sum(axis=1).max()) or 1.0),
    }  # fmt: skip
    if len(places) <= _NUMBERS:
        look["xticks"] = [(place, f"{place:.0f}") for place in places.tolist()]
    return styled(
        hv.Overlay(areas), "Overlay", look, bokeh={"height": 300},
        matplotlib={"fig_inches": (9, 5), "aspect": "auto"},
    )  # fmt: skip


def parallel(runs: Sequence[str], scales: Sequence[Scale], title: str) -> hv.Overlay:
    """Return each run as a line over parallel axes, coloured by its place on the last one.

    The lines are `hv.Path` with the dimensions `run` and `place` (on the last axis, from 0 to 1).
    """
    places = np.array([scale.places for scale in scales]).T
    across = np.arange(len(scales))
    lines = hv.Path(
        [
            {"axis": across, "height": each, "run": visible(run), "place": each[-1]}
            for run, each in zip(runs, places, strict=True)
        ],
        kdims=["axis", "height"],
        vdims=["run", "place"],
    )
    lines = styled(
        lines, "Path", {"color": "place", "cmap": [colour_at(x) for x in np.linspace(0, 0.9, 64)]},
        bokeh={"line_width": 1.8, "tools": ["hover"]}, matplotlib={"linewidth": 1.4},
    )  # fmt: skip
    marks = [
        (i + 0.02, at + 0.03, visible(text))
        for i, scale in enumerate(scales)
        for at, text in scale.ticks
    ]
    labels = styled(
        hv.Labels(marks, kdims=["axis", "height"], vdims=["text"]), "Labels", {},
        bokeh={"text_font_size": "11px", "text_color": INK, "text_align": "left"},
        matplotlib={"size": 9, "color": INK, "horizontalalignment": "left"},
    )  # fmt: skip
    poles = styled(
        hv.Segments([(i, 0, i, 1) for i in across.tolist()]), "Segments", {"color": INK},
    )  # fmt: skip
    names = [visible(scale.label) for scale in scales]
    look = {
        "title": title, "xticks": [*enumerate(names)], "yaxis": None, "xlabel": "",
        "xlim": (-0.2, len(scales) - 0.4), "ylim": (-0.08, 1.08),
        "xrotation": 20 if sum(map(len, names)) > _LETTERS else 0,
    }  # fmt: skip
    return styled(
        poles * lines * labels, "Overlay", look, bokeh={"height": _HEIGHT},
        matplotlib={"fig_inches": (max(7.0, 1.6 * len(scales)), 5.0), "aspect": "auto"},
    )  # fmt: skip


def heads_of(maps: Sequence[NDArray[np.float32]], names: Sequence[str], label: str) -> hv.Image:
    """Return small maps of attention heads: a row for each layer, a column for each head.

    Args:
        maps: for each layer, [heads, rows, columns]; each head is shown relative to its largest
            weight.
        names: the names of the layers.
        label: the title.
    """
    side = max(max(each.shape[1:]) for each in maps) + 1
    heads = max(len(each) for each in maps)
    whole = np.full((side * len(maps) - 1, side * heads - 1), np.nan)
    for layer, each in enumerate(maps):
        most = each.max((1, 2), keepdims=True, initial=0.0)
        shares = np.divide(each, most, out=np.zeros(each.shape, np.float64), where=most > 0)
        for head, share in enumerate(shares):
            top, left = layer * side, head * side
            whole[top : top + share.shape[0], left : left + share.shape[1]] = share
    rows, columns = whole.shape
    image = hv.Image(
        whole[::-1], bounds=(0, 0, columns, rows), kdims=["head", "layer"],
        vdims=["share of the largest weight"], label=label,
    )  # fmt: skip
    middle = (side - 1) / 2
    look = {
        "cmap": faded(ORANGE), "clim": (0, 1), "colorbar": True, "invert_yaxis": True,
        "xticks": [(head * side + middle, str(head)) for head in range(heads)],
        "yticks": [(layer * side + middle, visible(name)) for layer, name in enumerate(names)],
        "ylabel": "",
    }  # fmt: skip
    wide = max(4.0, 0.8 * heads + 2), max(2.5, 0.8 * len(maps) + 1)
    return styled(
        image, "Image", look,
        bokeh={"height": round(max(200, min(80 * len(maps) + 60, HIGHEST)))},
        matplotlib={"fig_inches": wide, "aspect": "auto", "cformatter": SHORT},
    )  # fmt: skip


def tokens_joined(
    weights: NDArray[np.float32], queries: Sequence[str], keys: Sequence[str], label: str
) -> hv.Overlay:
    """Return lines from queries (left) to keys (right), the more opaque the larger the weight.

    The lines of each head are `hv.Segments` with the dimension `weight`. A head without any
    positive weight has none.

    Args:
        weights: [heads, queries, keys], by the number of the head's colour.
        queries: the token of each row.
        keys: the token of each column.
        label: the title.
    """
    parts: list[Any] = []
    found = np.nan_to_num(weights)
    for head, colour in zip(range(len(found)), cycle(LINES), strict=False):
        rows, columns = np.nonzero(found[head] >= _FAINTEST * found[head].max(initial=0.0))
        values = found[head][rows, columns]
        known = values > 0
        rows, columns, values = rows[known], columns[known], values[known]
        if not len(values):  # Matplotlib cannot draw an element without lines
            continue
        opacity = values / values.max(initial=1.0) / np.sqrt(len(found))
        table = (np.zeros(len(rows)), rows, np.ones(len(rows)), columns, values, opacity)
        lines = hv.Segments(
            tuple(table), kdims=["x", "y", "right", "key"], vdims=["weight", "opacity"],
            label=f"head {head}",
        )  # fmt: skip
        parts.append(styled(lines, "Segments", {"color": colour, "alpha": "opacity"}))
    for x, words, side in ((-0.03, queries, "right"), (1.03, keys, "left")):
        places = [(x, i, visible(word)) for i, word in enumerate(words)]
        named = hv.Labels(places, kdims=["x", "y"], vdims=["token"])
        parts.append(
            styled(
                named, "Labels", {},
                bokeh={"text_align": side, "text_font_size": "11px", "text_color": INK},
                matplotlib={"horizontalalignment": side, "size": 8, "color": INK},
            )
        )  # fmt: skip
    count = max(len(queries), len(keys))
    look = {
        "title": label, "xaxis": None, "yaxis": None, "invert_yaxis": True, "show_legend": False,
        "xlim": (-0.6, 1.6), "ylim": (-0.7, count - 0.3),
    }  # fmt: skip
    return styled(
        hv.Overlay(parts), "Overlay", look,
        bokeh={"height": max(200, min(18 * count + 60, HIGHEST))},
        matplotlib={"fig_inches": (6, max(2.5, 0.22 * count + 0.8)), "aspect": "auto"},
    )  # fmt: skip


def neurons_of(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    weights: NDArray[np.float32],
    names: Sequence[str],
    label: str,
) -> hv.Layout:
    """Return the vectors of a query and of all keys as cells, above their products.

    As in the neuron view of BertViz (Vig 2019); a row's products, summed and scaled, are the score
    from which a softmax makes the row's weight, which its name contains.

    Args:
        query: [width].
        keys: [keys, width].
        weights: the weight of each key, [keys].
        names: of the query, then of each key.
        label: the title.
    """
    columns = [str(i) for i in range(len(query))]
    vectors = cells_of(
        np.vstack([query, keys]).astype(np.float64), ["query and keys", "neuron"],
        [[f"q {names[0]}", *(f"k {name}" for name in names[1:])], columns], label,
    )  # fmt: skip
    products = cells_of(
        (keys * query).astype(np.float64), ["key and its weight", "neuron"],
        [[f"{name}: {w:.3g}" for name, w in zip(names[1:], weights, strict=True)], columns],
        "q \u00d7 k", value="product",
    )  # fmt: skip
    return beside([vectors, products], across=1)


def worded(cells: hv.QuadMesh, words: Sequence[Sequence[str]], title: str) -> hv.Overlay:
    """Return named cells, whose values are not negative, with a word in each.

    The figure is as wide as the words need.
    """
    values = np.asarray(cells.dimension_values(2, flat=False), np.float64)
    dark = values > _DARK * np.nanmax(values, initial=0.0)
    places = [
        (column, row, visible(word), _WHITE if dark[row, column] else _BLACK)
        for row, line in enumerate(words)
        for column, word in enumerate(line)
    ]
    named = styled(
        hv.Labels(places, kdims=["column", "row"], vdims=["text", "colour"]), "Labels", {},
        bokeh={"text_font_size": "11px", "text_color": "colour"},
        matplotlib={"size": 8.5, "color": "colour"},
    )  # fmt: skip
    below = cells.dimension_values(4, flat=False)[0]  # the names of the columns
    longest = max(map(text_width, [*map(str, below), *itertools.chain(*words)]))
    wide = min(len(below) * (longest + 12), _WIDEST * 3)
    high = max(200, min(22 * len(words) + 100, HIGHEST))
    look = {"title": title, "invert_yaxis": True}
    return styled(
        cells * named, "Overlay", look, bokeh={"height": high},
        matplotlib={"fig_inches": (max(6.0, wide / 65 + 2.5), high / 70), "aspect": "auto"},
    )  # fmt: skip


def points_by(
    points: Mapping[str, hv.Points], dimension: str, title: str, frame: tuple[Floats, Floats]
) -> hv.NdOverlay:
    """Return points in a colour for each key, in a frame from its lowest to its highest corner."""
    overlay = hv.NdOverlay(points, kdims=[dimension], sort=False)
    overlay = styled(
        overlay, "Points", {"color": hv.Cycle(list(LINES))},
        bokeh={"size": 7, "tools": ["hover"], "height": _HEIGHT}, matplotlib={"s": 26},
    )  # fmt: skip
    (left, low), (right, high) = frame
    x, y = (right - left) * 0.05 or 0.5, (high - low) * 0.05 or 0.5
    look = {
        "title": title, "xlim": (left - x, right + x), "ylim": (low - y, high + y),
        "legend_position": "right", "show_legend": len(points) > 1,
    }  # fmt: skip
    return styled(overlay, "NdOverlay", look, bokeh={"height": _HEIGHT})


def _mark_isolated(plot: Any, curve: hv.Curve) -> None:
    """Draw a marker for each point without neighbours, which a line would not show."""
    x, y = (np.asarray(curve.dimension_values(number)) for number in (0, 1))  # x may be names
    if y.dtype.kind not in "biuf":
        return
    known = np.pad(np.isfinite(y), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    if not alone.any():
        return
    if plot.backend == "bokeh":
        colour = plot.handles["glyph"].line_color
        plot.handles["plot"].scatter(x[alone], y[alone], size=5, color=colour)
    else:
        colour = plot.handles["artist"].get_color()
        plot.handles["axis"].plot(x[alone], y[alone], "o", markersize=4, color=colour)


def styled(
    element: Any,
    kind: str,
    look: Mapping[str, Any],
    *,
    bokeh: Mapping[str, Any] | None = None,
    matplotlib: Mapping[str, Any] | None = None,
) -> Any:
    """Return an element with options of one kind of element for each available backend.

    Args:
        element: the element.
        kind: the kind of element whose options are set.
        look: options for all backends.
        bokeh: additional options for Bokeh; a height makes the plot as wide as its page.
        matplotlib: additional options for Matplotlib.
    """
    build = getattr(hv.opts, kind)
    more = dict(bokeh or {})
    if "height" in more:
        more.setdefault("responsive", True)
    hooks = [*look.get("hooks", ()), literal, plain]
    if kind == "Curve" and "hooks" not in look:
        hooks = [_mark_isolated, *hooks]  # options that are set later replace earlier ones
    element = element.opts(build(**{**look, **more, "hooks": hooks}, backend="bokeh"))
    if "matplotlib" in hv.Store.renderers:
        element = element.opts(build(**look, **(matplotlib or {}), backend="matplotlib"))
    return element


def literal(plot: Any, _: Any) -> None:
    """Show names in titles and at axes as they are: Bokeh would read `$$` in them as TeX."""
    figure = plot.handles.get("plot")
    if figure is None:
        return
    if figure.title is not None and isinstance(figure.title.text, str):
        figure.title.text = bokeh_text(figure.title.text)
    for axis in figure.axis:
        if isinstance(axis.axis_label, str):
            axis.axis_label = bokeh_text(axis.axis_label)
        labels = axis.major_label_overrides
        if all(isinstance(text, str) for text in labels.values()):  # else they are literal already
            axis.major_label_overrides = {at: bokeh_text(text) for at, text in labels.items()}


def plain(plot: Any, _: Any) -> None:
    """Give titles, labels and legends the sizes of the viewer's own figures, and its colours."""
    figure = plot.handles.get("plot")
    if figure is None:
        return
    if figure.title is not None:
        figure.title.text_font_size = "12.5px"
    for axis in figure.axis:
        axis.update(
            axis_label_text_font_size="11px", axis_label_text_font_style="normal",
            major_label_text_font_size="11px",
        )  # fmt: skip
    for legend in figure.legend:
        legend.update(
            label_text_font_size="11px", stylesheets=[LEGEND], background_fill_alpha=0,
            border_line_color=None,
        )  # fmt: skip


def _as_large_as_its_frame(plot: Any, _: Any) -> None:
    """Let a figure of Bokeh be as large as its frame and its axes need, instead of a fixed size."""
    figure = plot.handles.get("plot")
    if figure is not None:
        figure.sizing_mode = None


def picture_of(drawing: Drawing, label: str) -> Any:
    """Return a drawing of the viewer as an element.

    Pictures whose axes are alike, such as height and width, keep their shape in a page of any
    width. The axes of tiles show the numbers of the tiles.
    """
    across, down = drawing.across or "column", drawing.down or "row"
    if drawing.form in ("bars", "line"):
        values = drawing.image[0]
        kind = hv.Bars if drawing.form == "bars" else hv.Curve
        made = kind((np.arange(len(values)), values), across, "value", label=label)
        return styled(made, kind.__name__, {"color": BLUE}, bokeh={"height": 300})
    rows, columns = drawing.image.shape
    look: dict[str, Any] = {"invert_yaxis": True, "title": label, **_tile_axes(drawing)}
    if drawing.to_scale:
        look["hooks"] = [_as_large_as_its_frame]
    bokeh, matplotlib = _sizes(drawing)
    down = f"{down} (down)" if down == across else down  # dimensions need different names
    place = {"bounds": (0, 0, columns, rows), "kdims": [across, down]}
    if drawing.rgba is not None:
        channels = drawing.rgba.view(np.uint8).reshape(rows, columns, 4)[::-1]
        return styled(
            hv.RGB(channels, label=label, **place), "RGB", look, bokeh=bokeh, matplotlib=matplotlib
        )
    image = hv.Image(drawing.image[::-1], vdims=["value"], label=label, **place)
    limit = limit_of(drawing.image)
    colours = {"cmap": signed_faded(), "clim": (-limit, limit), "colorbar": True}
    return styled(
        image, "Image", look | colours,
        bokeh={**bokeh, "tools": ["hover"]}, matplotlib={**matplotlib, "cformatter": SHORT},
    )  # fmt: skip


def _sizes(drawing: Drawing) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of Bokeh and Matplotlib that set the size of a picture."""
    if not drawing.to_scale:
        return {"height": _HEIGHT}, {"aspect": "auto"}
    rows, columns = drawing.image.shape
    width = _HEIGHT * columns / (rows * drawing.aspect)
    shrunk = min(1.0, _WIDEST / width)
    frame = {"frame_width": round(width * shrunk), "frame_height": round(_HEIGHT * shrunk)}
    return frame, {"aspect": "equal" if drawing.aspect == 1 else width / _HEIGHT}


def _tile_axes(drawing: Drawing) -> dict[str, Any]:
    """Return options that number the tiles of a drawing, or the cells of a small one."""
    across, down = tile_ticks(drawing, _NUMBERS)
    if not across:
        sizes = zip(("yticks", "xticks"), drawing.image.shape, strict=True)
        return {
            name: [(i + 0.5, str(i)) for i in range(0, size, -(-size // _TICKS))]
            for name, size in sizes
            if size <= _NUMBERS
        }
    tile = drawing.tiles[0]
    wide, high = (f"0 to {size - 1} in each tile" for size in (tile.width, tile.height))
    return {
        "xticks": [*across.items()],
        "yticks": [*down.items()],
        "xlabel": f"{drawing.each[-1]} in the first row \u00b7 {drawing.across} {wide}",
        "ylabel": f"first {drawing.each[0]} of the row\n{drawing.down} {high}",
    }


def bars_against_diagonal(bins: Floats, label: str) -> Any:
    """Return a reliability diagram: the accuracy in each bin of the confidence.

    `bins` [bins, 3] are the mean confidence, the accuracy and the number of samples of each bin.
    The bars of a calibrated model end at the diagonal. Its dimensions are `confidence`, `accuracy`,
    `mean confidence` and `samples`; empty bins have no bar.
    """
    confidence, accuracy, counts = bins.T
    edges = np.linspace(0, 1, len(bins) + 1)
    bars = hv.Histogram(
        (edges, accuracy, confidence, counts),
        kdims=["confidence"],
        vdims=["accuracy", "mean confidence", "samples"],
        label="accuracy",
    )
    bars = styled(
        bars, "Histogram", {"alpha": 0.75},
        bokeh={"color": BLUE, "line_color": "white", "tools": ["hover"]},
        matplotlib={"facecolor": BLUE, "edgecolor": "white"},
    )  # fmt: skip
    line = hv.Curve(([0, 1], [0, 1]), "confidence", "accuracy", label="calibrated")
    line = styled(
        line, "Curve", {"color": "#777777"}, bokeh={"line_dash": "dashed"},
        matplotlib={"linestyle": "--"},
    )  # fmt: skip
    look: dict[str, Any] = {
        "title": label, "xlim": (0, 1), "ylim": (0, 1), "legend_position": "top_left",
        "hooks": [_as_large_as_its_frame],
    }  # fmt: skip
    frame = {"frame_width": _HEIGHT, "frame_height": _HEIGHT}
    return styled(bars * line, "Overlay", look, bokeh=frame, matplotlib={"aspect": "equal"})


def lines_over_names(
    values: NDArray[np.float64], names: list[str], steps: list[int], label: str, *, value: str
) -> hv.NdOverlay:
    """Return a line over names, such as layers, for each step; some of the steps if there are many.

    Args:
        values: [steps, names].
        names: what the values belong to, in order.
        steps: the steps.
        label: the title.
        value: the name of the values.
    """
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _LINES)).round().astype(int))
    places = np.arange(len(names))
    lines = {
        steps[i]: as_lines(
            hv.Curve((places, values[i], names), "layer", [value, "node"]).opts(tools=[])
        )
        for i in chosen.tolist()
    }
    overlay = hv.NdOverlay(lines, kdims=["step"], sort=False)
    overlay = styled(overlay, "Curve", {"color": hv.Cycle(list(LINES))}, bokeh={"height": _HEIGHT})
    look = {
        "title": label, "legend_position": "right", "ylim": (0, 1.03),
        "xticks": [*enumerate(names)],
        "xrotation": 90 if sum(map(len, names)) > _LETTERS / 2 else 0,
    }  # fmt: skip
    return styled(overlay, "NdOverlay", look, bokeh={"height": _HEIGHT})


def written(words: Sequence[str], values: NDArray[np.float64], label: str) -> hv.Overlay:
    """Return a text whose words are coloured by a number each, wrapped into lines.

    The words are `hv.Rectangles` with the dimensions `token`, `position` and `value`.

    Args:
        words: the words.
        values: [words], on a scale that diverges from zero.
        label: the title.
    """
    rows: list[tuple[Any, ...]] = []
    right, line = 0.0, 0
    for position, (word, value) in enumerate(zip(words, values.tolist(), strict=True)):
        text = visible(word)
        width = text_width(text) + 8
        if right and right + width > _WORDS:
            right, line = 0.0, line + 1
        corners = (right, line * _WORD, right + width, line * _WORD + _WORD - 3)
        rows.append((*corners, text, position, value))
        right += width + 2
    limit = limit_of(values[None])
    boxes = hv.Rectangles(
        rows, kdims=["x", "y", "right", "bottom"], vdims=["token", "position", "value"]
    )
    look = {"color": "value", "cmap": signed_faded(), "clim": (-limit, limit)}
    boxes = styled(
        boxes, "Rectangles", look,
        bokeh={"line_alpha": 0, "tools": [HoverTool(tooltips=[
            ("token", "@token"), ("position", "@position"), ("value", "@value")])]},
        matplotlib={"edgecolor": "none"},
    )  # fmt: skip
    names = [
        ((x + r) / 2, (y + b) / 2, text, _WHITE if abs(value) > _DARK * limit else _BLACK)
        for x, y, r, b, text, _, value in rows
    ]
    labels = styled(
        hv.Labels(names, kdims=["x", "y"], vdims=["text", "colour"]), "Labels", {},
        bokeh={"text_font_size": "11px", "text_color": "colour"},
        matplotlib={"size": 7.5, "color": "colour"},
    )  # fmt: skip
    height = (line + 1) * _WORD
    ends = f"{number(-limit, digits=3)} to {number(limit, digits=3)}"
    shape = {
        "title": f"{label}: {ends}", "fontsize": {"title": 10}, "xaxis": None, "yaxis": None,
        "show_frame": False, "xlim": (0, _WORDS), "ylim": (0, height), "invert_yaxis": True,
    }  # fmt: skip
    whole = (boxes * labels).opts(
        hv.opts.Overlay(
            **shape, backend="bokeh",
            width=round(_WORDS), height=height + 50, hooks=[literal],
        )
    )  # fmt: skip
    if "matplotlib" in hv.Store.renderers:
        whole = whole.opts(
            hv.opts.Overlay(
                **shape, backend="matplotlib",
                fig_inches=(_WORDS / 72, height / 72), aspect="auto",
            )
        )  # fmt: skip
    return whole


def cells_of(
    values: NDArray[np.float64],
    axes: list[str],
    names: list[list[str]],
    label: str,
    *,
    value: str = "value",
    signed: bool = True,
) -> hv.QuadMesh:
    """Return rows and columns with names, such as nodes or steps; the first row is on top.

    The dimensions are `column`, `row`, the value, and the names under those of the axes. This is
    not an `hv.HeatMap`, because Matplotlib draws the rows of one in another order than their names.
    The scale diverges from zero if the values are `signed`, and begins at zero otherwise.
    """
    down = f"{axes[0]} (down)" if axes[0] == axes[1] else axes[0]
    rows, columns = np.meshgrid(*(np.array(each, object) for each in names), indexing="ij")
    edges = [edges_of(np.arange(size)) for size in values.shape]
    found = hv.QuadMesh(
        (edges[1], edges[0], values, rows, columns),
        kdims=["column", "row"],
        vdims=[value, down, axes[1]],
        label=label,
    )
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    high = min(max(200, LINE * len(names[0]) + 100), HIGHEST)
    look = {
        "cmap": signed_faded() if signed else faded(ORANGE),
        "clim": (-largest if signed else 0, largest), "colorbar": True,
        "xlabel": axes[1], "ylabel": down, "invert_yaxis": True,
        "xticks": [*enumerate(names[1])], "yticks": [*enumerate(names[0])],
        "xrotation": 90 if sum(map(len, names[1])) > _LETTERS else 0,
    }  # fmt: skip
    inches = max(7.0, 0.2 * len(names[1]) + 2), high / 70
    return styled(
        found, "QuadMesh", look,
        bokeh={"height": high, "tools": ["hover"]},
        matplotlib={"fig_inches": inches, "aspect": "auto", "cformatter": SHORT},
    )  # fmt: skip


def distributions_of(
    values: Floats, names: list[str], statistic: str, label: str, *, every: int = 1
) -> hv.Overlay:
    """Return points for samples, above each other for each tensor, with the quartiles as boxes.

    Args:
        values: a statistic of each sample, [tensors, samples]; NaN where not recorded.
        names: the names of the tensors, in order.
        statistic: the name of the statistic.
        label: the title.
        every: one of this many samples is drawn as a point; the quartiles are those of all.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=1)
    places, known = np.arange(len(names)), np.isfinite(values)
    known[:, np.arange(values.shape[1]) % every > 0] = False
    layers, samples = np.nonzero(known)
    sides = places - _HALF, places + _HALF
    boxes = hv.Rectangles((sides[0], low, sides[1], high, names), vdims=["tensor"])
    boxes = styled(
        boxes, "Rectangles", {"color": BLUE, "alpha": 0.2}, bokeh={"line_color": None},
        matplotlib={"linewidth": 0},
    )  # fmt: skip
    medians = hv.Segments((sides[0], middle, sides[1], middle))
    medians = styled(medians, "Segments", {"color": BLUE})
    points = hv.Points(
        (layers, values[known], samples, np.array(names, object)[layers]),
        kdims=["layer", statistic],
        vdims=["sample", "tensor"],
    )
    points = styled(
        points, "Points", {"color": BLUE, "alpha": 0.8}, bokeh={"size": 4, "tools": ["hover"]},
        matplotlib={"s": 8},
    )  # fmt: skip
    apart = -(-len(names) // _NAMED)
    short = [cut(name, _NAME) for name in names]
    scale = scale_of(values[known])
    look: dict[str, Any] = {
        "title": label, "xlabel": "", "ylabel": statistic, "show_legend": False,
        "xlim": (-1, len(names)), "xticks": [*enumerate(short)][::apart],
        "xrotation": 90 if sum(map(len, short)) > _LETTERS else 0,
    }  # fmt: skip
    saved: dict[str, Any] = {"fig_inches": (9, 6), "aspect": 1.5}
    if scale.logarithmic:
        look |= {"logy": True, "ylim": (scale.low / 2, float(values[known].max()) * 1.5)}
        look["yformatter"] = "%g"  # powers of ten would be formulas, which saved images do not have
        saved["hooks"] = [_numbers_along]
    return styled(
        boxes * medians * points, "Overlay", look, bokeh={"height": _HEIGHT + 60}, matplotlib=saved
    )


def _numbers_along(plot: Any, _: Any) -> None:
    """Write numbers along an overlay's axis, of which Matplotlib ignores the formatter."""
    plot.handles["axis"].yaxis.set_major_formatter("{x:g}")


def edges_of(positions: NDArray[np.int64] | Floats) -> NDArray[np.float64]:
    """Return the edges of cells, which lie halfway between neighbours."""
    if len(positions) == 1:
        return np.array([positions[0] - 0.5, positions[0] + 0.5])
    middle = (positions[1:] + positions[:-1]) / 2
    first, last = 2 * positions[0] - middle[0], 2 * positions[-1] - middle[-1]
    return np.concatenate([[first], middle, [last]])
