"""Heat map of all tensors over training; a click selects tensor and step."""

from __future__ import annotations

from typing import Any, ClassVar

from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import BoxAnnotation

from comgra_decl.viewer.escaping import bokeh_text
from comgra_decl.viewer.model.findings import COLOURS, placed
from comgra_decl.viewer.model.labels import BATCH_LABELS, pass_label
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.overview import Overview, overview
from comgra_decl.viewer.model.selection import nearest
from comgra_decl.viewer.model.tables import overview_csv
from comgra_decl.viewer.palette import RED, colour_at, signed_colour
from comgra_decl.viewer.panes.base import PASSES, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import IMAGE, Frame, image
from comgra_decl.visible import visible

_SHADES = 128
_MOST_LABELS = 26  # as many as fit next to an image that is 310 pixels high, as on a laptop
_EMPTY: dict[str, list[Any]] = {name: [] for name in (*IMAGE, "value")}
_NAME = "return names[Math.floor(value)] ?? ''"


class OverviewPane(Pane):
    """The selected statistic of one pass. Place 0 is the forward pass, place 1 the gradient."""

    reads: ClassVar = frozenset(
        {"run", "revision", "type", "step", "node", "role", "iteration", "gradient", "batch",
         "statistic", "looked"}
    )  # fmt: skip

    def __init__(self, act: Act, *, place: int, x_range: Range1d) -> None:
        self._place = place
        self._x_range = x_range
        self._drawn: object = None
        self._picture: Overview | None = None
        super().__init__(act)

    def build(self) -> Any:
        """Creates the figure with a frame and images of the values and of non-finite values."""
        self._names = CustomJSHover(code=_NAME, args={"names": []})
        tooltips = [("tensor", "$y{custom}"), ("step", "$x{0}"), ("value", "@value{0.000e}")]
        self.frame = Frame(x_range=self._x_range, tooltips=tooltips, both=True)
        fig = self.frame.figure
        self._image = ColumnDataSource(dict(_EMPTY))
        self._broken = ColumnDataSource({name: [] for name in IMAGE})
        self._mapper = LinearColorMapper(palette=["#000000"], low=0, high=1, nan_color="#00000000")
        drawn = image(fig, self._image, self._mapper)
        marks = LinearColorMapper(palette=[RED, RED], low=0, high=1, nan_color="#00000000")
        image(fig, self._broken, marks)
        fig.hover.renderers = [drawn]
        fig.hover.formatters = {"$y": self._names}
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
        """Returns the figure; its CSV contains every record."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} overview", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        at = self._shown.at
        return overview_csv(self._shown.view, at, at.gradient if self._place else "forward")

    def update(self, shown: Shown) -> None:
        """Redraws if the statistic or the records have changed; otherwise, moves the markers."""
        at = shown.at
        pass_ = at.gradient if self._place else "forward"
        within = self.frame.window
        key = (shown.view, shown.view.revision, at.type, at.iteration, pass_, at.over,
               at.statistic, within)  # fmt: skip
        if key != self._drawn:
            self._picture = overview(shown.view, at, pass_, within=within)
            self._draw(self._picture)
            self.frame.title = _title(shown, pass_, self._picture)
            self._drawn = key
        self._flag(pass_)
        self.frame.mark_step(at.step)
        self._mark_line(None if self._picture is None else self._picture.line_of(at))

    def _flag(self, pass_: str) -> None:
        """Draws a diamond at the tensor and the first step of each finding."""
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
        if picture is None:
            self._image.data, self._broken.data = dict(_EMPTY), {name: [] for name in IMAGE}
            self.frame.show_message("Nothing was recorded for this pass.")
            return
        lines = len(picture.slots)
        width = picture.x1 - picture.x0
        place: dict[str, Any] = {"x": [picture.x0], "y": [0], "dw": [width], "dh": [lines]}
        self._mapper.palette = _palette(picture.scale.diverging)
        self._image.data = {"image": [picture.places], "value": [picture.values], **place}
        self._broken.data = {"image": [picture.broken], **place}
        self._names.args = {"names": [visible(f"{s.node} \u00b7 {s.role}") for s in picture.slots]}
        self._label(picture.labels)
        self.frame.show_message("")
        self.frame.show(x=picture.all_, y=(float(lines), 0.0))

    def _label(self, labels: list[str]) -> None:
        """Labels the lines, or only evenly spaced lines if there are many."""
        every = -(-len(labels) // _MOST_LABELS)
        ticks = range(0, len(labels), every)
        self._ticker.ticks = [line + 0.5 for line in ticks]
        axis: Any = self.frame.figure.yaxis[0]
        axis.major_label_overrides = {line + 0.5: bokeh_text(labels[line]) for line in ticks}

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
        steps = self._shown.view.steps(self._shown.at.type)
        self.act(node=slot.node, role=slot.role, step=nearest(steps, round(x)), follow=False)


def _palette(diverging: bool) -> list[str]:
    places = [i / (_SHADES - 1) for i in range(_SHADES)]
    return [signed_colour(2 * p - 1) if diverging else colour_at(p) for p in places]


def _title(shown: Shown, pass_: str, picture: Overview | None) -> str:
    at = shown.at
    parts = [pass_label(pass_), at.statistic, f"batch {BATCH_LABELS[at.over].lower()}"]
    if picture is not None:
        low, high = number(picture.scale.low, digits=3), number(picture.scale.high, digits=3)
        parts.append(f"{low} to {high}{' (log)' if picture.scale.logarithmic else ''}")
    return " \u00b7 ".join(parts)
