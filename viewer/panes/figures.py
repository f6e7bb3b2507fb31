"""Bokeh figures in the viewer's style, created once and updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import panel as pn
from bokeh.events import DoubleTap, RangesUpdate, Tap
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    Image,
    LinearColorMapper,
    Range1d,
    Text,
)
from bokeh.models.annotations import Legend, LegendItem, Span, Title
from bokeh.models.formatters import CustomJSTickFormatter
from bokeh.models.glyph import Glyph
from bokeh.models.labeling import NoOverlap
from bokeh.models.renderers import GlyphRenderer
from bokeh.models.tickers import BasicTicker, FixedTicker
from bokeh.plotting import figure

from comgra_decl.viewer.escaping import bokeh_text
from comgra_decl.viewer.model.ticks import log_ticks
from comgra_decl.viewer.palette import GREY, RED
from comgra_decl.viewer.panes.hovering import Hover, Row
from comgra_decl.viewer.style import LEGEND
from comgra_decl.visible import visible

MIN_HEIGHT = 170
_BUTTON, _LETTER = 26, 7.1  # pixels of the download button, and of a letter of a title
IMAGE = ("image", "x", "y", "dw", "dh")
"""Columns of an image's data source: values [rows, columns], position, extent."""

_TICK = """
if (power) { tick = 10 ** tick }
const size = Math.abs(tick)
const short = size !== 0 && (size >= 1e4 || size < 1e-3)
  ? tick.toExponential(3).replace(/\\.?0+e/, "e").replace("e+", "e")
  : String(Number(tick.toPrecision(4)))
return short.replaceAll("-", "\u2212").padStart(7, "\u2007")
"""
_WHOLE = """
return Number.isInteger(tick) ? tick.toLocaleString("en").replaceAll(",", "\u202f") : ""
"""
"""Labels for steps and indices, as in the step bar: whole numbers with thin spaces."""

DIGITS = "Menlo, monospace"
"""Monospaced tick labels, because Bokeh lays out the whole page whenever an axis changes its width.

The list is short because every font name is looked up for each label.
"""
FEW, _TICKS = 3, 5
"""Maximum numbers of ticks in small and large figures.

Drawing the labels takes nearly half of the time needed to paint a small figure.
"""


class Frame:
    """A figure with fixed ranges, a title, a marker for the current step, and a message.

    The ranges are fixed because updating automatic ranges takes more than twice as long.
    Dragging zooms, and a double click resets the zoom. A new range from Python is used only if the
    user has not zoomed.
    """

    def __init__(
        self,
        *,
        x_range: Range1d | None = None,
        tooltips: list[Row] | None = None,
        both: bool = False,
        ticks: int = _TICKS,
    ) -> None:
        self._home: dict[str, tuple[float, float]] = {}
        self._x = x_range or unit_range()
        self._y = unit_range()
        self._formatter = CustomJSTickFormatter(code=_TICK, args={"power": 0})
        self.figure = figure(
            sizing_mode="stretch_both",
            min_height=MIN_HEIGHT,
            height=MIN_HEIGHT,
            x_range=self._x,
            y_range=self._y,
            tools=[],
            toolbar_location=None,  # downloads have their own button
            min_border_left=46,
            min_border_right=12,
            min_border_top=4,
            output_backend="canvas",
            tags=["frame"],  # see shared.js
        )
        self._title_text = self._left = ""
        self._width = 0  # of the plot area in pixels; 0 until the browser has told it
        self._below: tuple[str, ...] = ("",)
        self._title = Title(text="", text_font_size="12.5px", text_font_style="bold")
        self.figure.title = self._title
        zoomer = BoxZoomTool(dimensions="both" if both else "width")
        self.figure.add_tools(zoomer)
        self.hover = Hover(tooltips or [])
        if tooltips is not None:
            self.figure.add_tools(self.hover.tool)
        self.figure.toolbar.active_drag = zoomer
        self._linear, self._log = BasicTicker(desired_num_ticks=ticks), FixedTicker(ticks=[])
        self.figure.yaxis.ticker = self._linear
        self.figure.xaxis.ticker = BasicTicker(desired_num_ticks=ticks)
        _style(self.figure, self._formatter)
        self.figure.on_event(DoubleTap, lambda _: self._show_all())
        self.figure.on_change("inner_width", self._on_width)
        self._message = ColumnDataSource({"x": [], "y": [], "text": []})
        message = Text(
            x="x", y="y", text="text", text_align="center", text_baseline="middle",
            text_font_size="12px", text_color=GREY,
        )  # fmt: skip
        plainly(self.figure, message, self._message)
        self._span: Span | None = None
        self._step: int | None = None

    def pane(self) -> pn.pane.Bokeh:
        """Return the figure as a Panel object that fills its cell."""
        return pn.pane.Bokeh(  # type: ignore[no-untyped-call]
            self.figure, sizing_mode="stretch_both", margin=0
        )

    @property
    def title(self) -> str:
        """Text above the figure."""
        return self._title_text

    @title.setter
    def title(self, text: str) -> None:
        if self._title_text != text:
            self._title_text = text
            self._show_title()

    def _show_title(self) -> None:
        """Show as much of the title as fits beside the download button."""
        room = int((self._width - _BUTTON) / _LETTER)
        text = self._title_text
        if 0 < room < len(text):
            text = f"{text[: room - 1].rstrip()}\u2026"
        if self._title.text != bokeh_text(text):
            self._title.text = bokeh_text(text)

    def _on_width(self, _attr: str, _old: object, pixels: int) -> None:
        self._width = pixels
        with pn.io.hold():
            self._show_title()

    def mark_step(self, step: int | None) -> None:
        """Move the vertical line to the current step; None hides it."""
        if self._span is None:
            self._span = Span(  # an overlay moves without repainting the data
                location=0, dimension="height", line_color=RED, line_width=1.5, level="overlay"
            )
            self.figure.add_layout(self._span)
        if step is not None and self._span.location != step:
            self._span.location = step
        self._step = step
        self._show_step()

    def _show_step(self) -> None:
        """Show the line at the current step, unless a message takes its place."""
        seen = self._step is not None and not len(self._message.data["text"])
        if self._span is not None and self._span.visible != seen:
            self._span.visible = seen

    @property
    def window(self) -> tuple[float, float] | None:
        """The zoomed part of the x axis; None if the whole axis is shown."""
        now = float(self._x.start), float(self._x.end)  # type: ignore[arg-type]
        return None if self._home.get("x", now) == now else now

    def on_zoom(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the user zooms this figure or one that shares its x axis."""
        zoomed = False

        def notify(_event: object) -> None:  # with an argument, as notebooks require
            nonlocal zoomed
            zoomed = self.window is not None
            with pn.io.hold():
                callback()

        def back(_attr: str, _old: object, _new: object) -> None:
            if zoomed and self.window is None:
                notify(None)

        self.figure.on_event(RangesUpdate, notify)
        for end in ("start", "end"):  # a double click in any figure resets all
            self._x.on_change(end, back)

    def on_tap(self, callback: Callable[[float, float], None]) -> None:
        """Call `callback(x, y)`, in data units, whenever the user clicks in the plot area."""
        self.figure.on_event(Tap, lambda event: callback(event.x, event.y))

    def show(
        self, *, x: tuple[float, float] | None = None, y: tuple[float, float] | None = None
    ) -> None:
        """Set ranges that contain all data; a zoomed axis does not change."""
        if x is not None:
            self._range("x", self._x, x)
        if y is not None:
            self._range("y", self._y, y)
            ticks = log_ticks(min(y), max(y), _TICKS) if self._formatter.args["power"] else []
            if ticks != self._log.ticks:
                self._log.ticks = ticks

    def set_log(self, log: bool) -> None:
        """Labels the y axis as powers of ten; the data must be logarithms."""
        if bool(self._formatter.args["power"]) != log:
            self._formatter.args = {"power": int(log)}
            self.figure.yaxis.ticker = self._log if log else self._linear

    def label(self, *x: str) -> None:
        """Set the label of the x axis, in one or more lines."""
        if self._below != x:
            self._below = x
            self.figure.xaxis[0].axis_label = bokeh_text(*x)

    def label_left(self, y: str) -> None:
        """Set the label of the y axis."""
        if self._left != y:
            self._left = y
            self.figure.yaxis[0].axis_label = bokeh_text(y)

    def show_message(self, text: str) -> None:
        """Show a message in the middle of the empty figure; "" removes it."""
        known = list(self._message.data["text"])
        if known == ([text] if text else []):
            return
        seen = 0.0 if text else 1.0
        for axis in (*self.figure.xaxis, *self.figure.yaxis):  # fixed width, see `DIGITS`
            axis.update(major_label_text_alpha=seen, axis_label_text_alpha=seen)
        self.figure.ygrid.visible = not text
        if text:
            self.show(y=(0.0, 1.0))
            middle = (float(self._x.start) + float(self._x.end)) / 2  # type: ignore[arg-type]
            self._message.data = {"x": [middle], "y": [0.5], "text": [wrapped(visible(text))]}
        else:
            self._message.data = {"x": [], "y": [], "text": []}
        self._show_step()

    def _range(self, axis: str, shown: Range1d, wanted: tuple[float, float]) -> None:
        home = self._home.get(axis)
        self._home[axis] = wanted
        if (home is None or home == (shown.start, shown.end)) and home != wanted:
            shown.update(start=wanted[0], end=wanted[1])

    def _show_all(self) -> None:
        for axis, shown in (("x", self._x), ("y", self._y)):
            if axis in self._home:
                shown.update(start=self._home[axis][0], end=self._home[axis][1])


def wrapped(text: str, width: int = 34) -> str:
    """Return a message wrapped into lines of about `width` characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def image(fig: Any, source: ColumnDataSource, mapper: LinearColorMapper) -> GlyphRenderer[Any]:
    """Draw the images in `source` (columns `IMAGE`) into a figure."""
    columns: dict[str, Any] = {name: name for name in IMAGE}
    return plainly(fig, Image(**columns, color_mapper=mapper), source)


def plainly(fig: Any, glyph: Glyph, source: ColumnDataSource) -> GlyphRenderer[Any]:
    """Draw a glyph into a figure.

    Bokeh's figure methods would add four copies of it for selection and hover states. These copies
    would make up most of the objects on the page. The viewer does not use selections in figures.
    """
    drawn: GlyphRenderer[Any] = fig.add_glyph(
        source, glyph, selection_glyph=None, nonselection_glyph=None, hover_glyph=None,
        muted_glyph=None,
    )  # fmt: skip
    return drawn


def legend(items: list[LegendItem], *, visible: bool = True) -> Any:
    """Return a legend in the upper right corner, in theme colours."""
    return Legend(
        items=items,
        visible=visible,
        orientation="horizontal",
        border_line_color=None,
        background_fill_alpha=0,
        label_text_font_size="11px",
        location="top_right",
        stylesheets=[LEGEND],
    )


def put(source: ColumnDataSource, data: dict[str, Any]) -> None:
    """Replace the data in a source. Sends nothing if the source was empty and remains empty."""
    columns: tuple[Any, ...] = (*data.values(), *dict(source.data).values())
    if any(len(column) for column in columns):
        source.data = data


def whole() -> CustomJSTickFormatter:
    """Return a formatter for axes of steps or indices."""
    return CustomJSTickFormatter(code=_WHOLE)


def unit_range() -> Range1d:
    """Return a range from 0 to 1."""
    return Range1d(start=0, end=1)


def _style(fig: Any, formatter: CustomJSTickFormatter) -> None:
    fig.outline_line_color = None
    fig.background_fill_alpha = 0
    fig.border_fill_alpha = 0
    for axis in (fig.xaxis, fig.yaxis):
        axis.axis_line_color = None
        axis.minor_tick_line_color = None
        axis.major_tick_line_color = None
        axis.major_label_text_font_size = "11px"
        axis.major_label_standoff = 4
        axis.axis_label_text_font_size = "11px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_standoff = 2
    fig.yaxis.formatter = formatter
    fig.yaxis.major_label_text_font = DIGITS
    fig.xaxis.formatter = whole()
    fig.xaxis.major_label_policy = NoOverlap(min_distance=6)
    fig.xgrid.grid_line_color = None
    fig.ygrid.grid_line_color = GREY
    fig.ygrid.grid_line_alpha = 0.3
