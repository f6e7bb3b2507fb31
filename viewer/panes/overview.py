"""Heat map of all tensors over training; a click selects tensor and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import BoxAnnotation, ColorBar

from comgra_decl.viewer.escaping import bokeh_text
from comgra_decl.viewer.model.colour_bar import bar_ticks
from comgra_decl.viewer.model.findings import COLOURS, placed
from comgra_decl.viewer.model.labels import BATCH_LABELS, pass_label
from comgra_decl.viewer.model.overview import Overview, overview
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.tables import overview_csv
from comgra_decl.viewer.palette import GREY, INK, RED, colour_at, signed_colour
from comgra_decl.viewer.panes.base import PASSES, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import DIGITS, IMAGE, Frame, image
from comgra_decl.viewer.panes.hovering import Row, marked
from comgra_decl.viewer.panes.inline import inline_steps

_SHADES = 128
_WIDTH = 7  # characters of the colour bar's labels
_MOST_LABELS = 26  # labels that fit into an image 310 pixels high, as on a laptop
_EMPTY: dict[str, list[Any]] = {name: [] for name in (*IMAGE, "value", "step")}
_GAP = "hatched: not recorded"


class OverviewPane(Pane):
    """The selected statistic of one pass: the forward pass at place 0, the gradient at place 1."""

    reads: ClassVar = frozenset(
        {"run", "revision", "type", "step", "node", "role", "iteration", "gradient", "batch",
         "statistic", "looked"}
    )  # fmt: skip

    def __init__(self, act: Act, *, place: int, x_range: Range1d) -> None:
        self._place = place
        self._x_range = x_range
        self._drawn: object = None
        self._picture: Overview | None = None
        self._labels: list[str] = []
        super().__init__(act)

    def build(self) -> Any:
        """Create the figure: an image of the values, one of non-finite values, a frame."""
        tooltips = [Row("tensor", "$y", "line"), Row("step", "@step", "step"),
                    Row("value", "@value", "cell")]  # fmt: skip
        self.frame = Frame(x_range=self._x_range, tooltips=tooltips, both=True)
        fig = self.frame.figure
        self._image = ColumnDataSource(dict(_EMPTY))
        self._broken = ColumnDataSource({name: [] for name in IMAGE})
        self._mapper = LinearColorMapper(palette=["#000000"], low=0, high=1, nan_color="#00000000")
        drawn = image(fig, self._image, self._mapper)
        marks = LinearColorMapper(palette=[RED, RED], low=0, high=1, nan_color="#00000000")
        image(fig, self._broken, marks)
        fig.hover.renderers = [drawn]
        self._ground = BoxAnnotation(  # visible where the image is transparent
            level="underlay", fill_alpha=0, line_alpha=0, hatch_pattern="right_diagonal_line",
            hatch_color=GREY, hatch_alpha=0.5, hatch_scale=8, hatch_weight=0.8,
        )  # fmt: skip
        fig.add_layout(self._ground)
        self._bar = _colour_bar(self._mapper)
        fig.add_layout(self._bar, "right")
        fig.ygrid.grid_line_color = None
        self._ticker = FixedTicker(ticks=[])
        fig.yaxis.ticker = self._ticker
        self._box = BoxAnnotation(
            top=0, bottom=0, fill_alpha=0, line_color=RED, line_width=2.5, level="overlay"
        )
        fig.add_layout(self._box)
        self._found = ColumnDataSource({name: [] for name in ("x", "y", "colour", "text")})
        flags = fig.scatter(
            "x", "y", source=self._found, marker="diamond", size=11, fill_color="colour",
            line_color="white", line_width=1.5,
        )  # fmt: skip
        fig.add_tools(HoverTool(renderers=[flags], tooltips="@text"))
        self.frame.on_tap(self._select)
        self.frame.on_zoom(self.again)
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """Return the figure; its CSV contains every record."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} overview", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        at = self._shown.at
        return overview_csv(self._shown.view, at, at.gradient if self._place else "forward")

    def update(self, shown: Shown) -> None:
        """Redraw if the statistic or the records changed; otherwise only moves the markers."""
        at = shown.at.wide
        pass_ = at.gradient if self._place else "forward"
        within = self.frame.window
        key = (shown.view, shown.view.revision, at.type, at.iteration, pass_, at.over,
               at.statistic, within)  # fmt: skip
        if key != self._drawn:
            self._picture = overview(shown.view, at, pass_, within=within)
            self._draw(self._picture)
            self.frame.title = _title(shown, pass_)
            self._drawn = key
        self._flag(pass_)
        if self._picture is not None:
            self._label(self._picture, at)
        self.frame.label(self._legend())
        self.frame.mark_step(at.step)
        self._mark_line(None if self._picture is None else self._picture.line_of(at))

    def _flag(self, pass_: str) -> None:
        """Draw a diamond at the tensor and the first step of each finding."""
        rows: list[tuple[int, float, str, str]] = []
        if self._shown is not None and self._picture is not None:
            lines = {(s.node, s.role): i for i, s in enumerate(self._picture.slots)}
            for place, step, finding in placed(self._shown.view, pass_):
                line = lines.get((place.node, place.role))
                if line is not None:
                    text = f"{finding.severity}: {finding.rule} from {finding.began}"
                    rows.append((step, line + 0.5, COLOURS[finding.severity], text))
        x, y, colour, text_ = zip(*rows, strict=True) if rows else ((), (), (), ())
        data: dict[str, Any] = {
            "x": list(x), "y": list(y), "colour": list(colour), "text": list(text_)
        }  # fmt: skip
        if data != self._found.data:
            self._found.data = data

    def _draw(self, picture: Overview | None) -> None:
        self._bar.visible = self._ground.visible = picture is not None
        if picture is None:
            self._image.data, self._broken.data = dict(_EMPTY), {name: [] for name in IMAGE}
            self.frame.show_message("Nothing was recorded for this pass.")
            return
        lines = len(picture.slots)
        width = picture.x1 - picture.x0
        place: dict[str, Any] = {"x": [picture.x0], "y": [0], "dw": [width], "dh": [lines]}
        self._mapper.palette = _palette(picture.scale.diverging)
        self._bar.color_mapper.palette = self._mapper.palette
        self._mark(bar_ticks(picture.scale))
        shown = marked(picture.values, picture.broken)
        steps = [inline_steps(picture.steps)]
        self._image.data = {"image": [picture.places], "value": [shown], "step": steps, **place}
        self._broken.data = {"image": [picture.broken], **place}
        self.frame.hover.name(names=[f"{s.node} \u00b7 {s.role}" for s in picture.slots])
        self.frame.show_message("")
        self.frame.show(x=picture.all_, y=(float(lines), 0.0))

    def _label(self, picture: Overview, at: Selection) -> None:
        """Labels the lines; if there are many, those with findings, the selected one and a few."""
        labels, flagged = picture.labels, [int(y) for y in np.asarray(self._found.data["y"])]
        chosen = picture.line_of(at)
        first = [*flagged, *([] if chosen is None else [chosen])]
        lines = labelled(len(labels), first)
        ticks = [line + 0.5 for line in lines]
        if ticks == self._ticker.ticks and labels == self._labels:
            return
        self._labels = labels
        self._ticker.ticks = ticks
        axis: Any = self.frame.figure.yaxis[0]
        axis.major_label_overrides = {line + 0.5: bokeh_text(labels[line]) for line in lines}

    def _mark(self, ticks: dict[float, str]) -> None:
        """Labels the colour bar. All labels have the same width; see `figures.DIGITS`."""
        self._bar.ticker.ticks = list(ticks)
        labels = {place: text.ljust(_WIDTH, "\u2007") for place, text in ticks.items()}
        self._bar.major_label_overrides = {p: bokeh_text(text) for p, text in labels.items()}

    def _legend(self) -> str:
        """Return what the marks in this map mean."""
        picture = self._picture
        if picture is None:
            return "step"
        parts = ["step"]
        if (np.isnan(picture.places) & np.isnan(picture.broken)).any():
            parts.append(_GAP)
        if not np.isnan(picture.broken).all():
            parts.append("red: NaN or infinite")
        if len(self._found.data["x"]):
            parts.append("\u25c6 finding")
        if picture.scale.logarithmic:
            parts.append("log colours")
        return " \u00b7 ".join(parts)

    def _mark_line(self, line: int | None) -> None:
        if line is not None and (self._box.bottom, self._box.top) != (line, line + 1):
            self._box.update(bottom=line, top=line + 1)
        if self._box.visible != (line is not None):
            self._box.visible = line is not None

    def _select(self, x: float, y: float) -> None:
        if self._shown is None or self._picture is None:
            return
        line = min(max(int(y), 0), len(self._picture.slots) - 1)
        slot = self._picture.slots[line]
        step = self._picture.step_at(line, x)  # as in the tooltip
        self.act(node=slot.node, role=slot.role, step=step, follow=False)


def labelled(count: int, first: Sequence[int]) -> list[int]:
    """Return the lines of a map that get a label, ascending and far enough apart.

    Args:
        count: Number of lines.
        first: Lines to label before any others, most important first.
    """
    apart = -(-count // _MOST_LABELS)
    lines: list[int] = []
    for line in (*first, *range(0, count, apart)):
        if all(abs(line - other) >= apart for other in lines):
            lines.append(line)
    return sorted(lines)


def _colour_bar(mapper: LinearColorMapper) -> Any:
    """Return a colour bar for positions from 0 to 1."""
    return ColorBar(
        color_mapper=LinearColorMapper(palette=mapper.palette, low=0, high=1),
        ticker=FixedTicker(ticks=[]), width=9, padding=4, margin=0, label_standoff=4,
        major_tick_line_color=None, bar_line_color=None, border_line_color=None,
        background_fill_alpha=0, major_label_text_font_size="10.5px",
        major_label_text_font=DIGITS,
        major_label_text_color=INK,
    )  # fmt: skip


def _palette(diverging: bool) -> list[str]:
    places = [i / (_SHADES - 1) for i in range(_SHADES)]
    return [signed_colour(2 * p - 1) if diverging else colour_at(p) for p in places]


def _title(shown: Shown, pass_: str) -> str:
    at = shown.at.wide
    return " \u00b7 ".join(
        [pass_label(pass_), at.statistic, f"batch {BATCH_LABELS[at.over].lower()}"]
    )
