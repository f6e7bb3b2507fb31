"""One statistic of the selected tensor over training; a click jumps to that step."""

from __future__ import annotations

from typing import Any, ClassVar

from bokeh.models import ColumnDataSource, Line, Range1d, Scatter, VArea

from comgra_decl.viewer.model.labels import BATCH_LABELS, named, pass_label
from comgra_decl.viewer.model.selection import nearest, slots_of
from comgra_decl.viewer.model.series import Curve, band, curve, extent, isolated
from comgra_decl.viewer.model.tables import series_csv
from comgra_decl.viewer.palette import BLUE, GREY, ORANGE, RED
from comgra_decl.viewer.panes.base import PASSES, TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import FEW, Frame, plainly, put
from comgra_decl.viewer.panes.hovering import STEP, SUBJECT, Row
from comgra_decl.viewer.panes.inline import Inline, inline, inline_steps

_FEW = 60
"""Maximum number of points for which a line has markers. Markers would hide a longer line.

A single point always gets a marker.
"""

_LINE, _BAND = ("x", "y", "value"), ("x", "low", "high")
_CONTEXT = _DOTS = ("x", "y")


class SeriesPane(Pane):
    """The series of one pass: the forward pass at place 0, the gradient at place 1."""

    reads: ClassVar = TENSOR | {"step", "gradient", "batch", "statistic", "scale"}

    def __init__(self, act: Act, *, place: int, x_range: Range1d) -> None:
        self._place = place
        self._x_range = x_range
        self._drawn: object = None
        super().__init__(act)

    def build(self) -> Any:
        """Create the figure: context, band, line, non-finite points."""
        tooltips = [SUBJECT, STEP, Row("value", "@value")]
        self.frame = Frame(x_range=self._x_range, tooltips=tooltips, ticks=FEW)
        colour = ORANGE if self._place else BLUE
        self._band, self._context, self._dots = (_source(n) for n in (_BAND, _CONTEXT, _DOTS))
        self._line, self._broken = _source(_LINE), _source(_LINE)
        fig = self.frame.figure
        area = VArea(x="x", y1="low", y2="high", fill_color=colour, fill_alpha=0.16)
        plainly(fig, area, self._band)
        plainly(fig, Line(x="x", y="y", line_color=GREY, line_alpha=0.7), self._context)
        main = plainly(fig, Line(x="x", y="y", line_color=colour, line_width=1.6), self._line)
        dot = Scatter(x="x", y="y", size=5, line_color=colour, fill_color=colour)
        plainly(fig, dot, self._dots)
        cross = Scatter(x="x", y="y", marker="x", size=8, line_color=RED, line_width=2)
        broken = plainly(fig, cross, self._broken)
        self.frame.hover.along([main, broken])
        self.frame.on_tap(self._jump)
        self.frame.on_zoom(self.again)
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """Return the figure; its CSV contains every record."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} series", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        view, at = self._shown.view, self._shown.at
        return series_csv(view, slots_of(view, at)[self._place], at)

    def update(self, shown: Shown) -> None:
        """Redraw the line if the tensor or statistic has changed. Always moves the step marker."""
        at, within = shown.at, self.frame.window
        key = (shown.view, shown.view.revision, at.type, at.node, at.role, at.iteration,
               at.gradient, at.batch, at.statistic, shown.scale, within)  # fmt: skip
        if key != self._drawn:
            slot = slots_of(shown.view, at)[self._place]
            line = curve(shown.view, slot, at, within=within)
            self._draw(line, line.logarithmic() if shown.scale == "log" else line, shown)
            self._drawn = key
        self.frame.mark_step(at.step)

    def _draw(self, recorded: Curve, line: Curve, shown: Shown) -> None:
        self.frame.title = _title(shown, self._place)
        self.frame.hover.name(named(shown.at))
        x, y = inline_steps(line.steps), inline(line.values)
        self._line.data = {"x": x, "y": y, "value": inline(recorded.values)}
        put(self._band, dict(zip(_BAND, map(inline, band(line)), strict=True)))
        put(self._context, _columns(_CONTEXT, x, inline(line.context)))
        dots = slice(None) if len(x) <= _FEW else isolated(line.values)
        put(self._dots, _columns(_DOTS, inline_steps(line.steps[dots]), inline(line.values[dots])))
        bottom = line.bounds[0] + 0.03 * (line.bounds[1] - line.bounds[0])
        count = len(line.broken)
        nothing = [float("nan")] * count
        put(self._broken, {"x": line.broken.tolist(), "y": [bottom] * count, "value": nothing})
        self.frame.set_log(shown.scale == "log")
        self.frame.show(x=extent(shown.view.steps(shown.at.type)), y=line.bounds)
        self.frame.show_message(line.missing)

    def _jump(self, x: float, _: float) -> None:
        if self._shown is not None:
            steps = self._shown.view.steps(self._shown.at.type)
            self.act(step=nearest(steps, round(x)), follow=False)


def _source(names: tuple[str, ...]) -> ColumnDataSource:
    return ColumnDataSource({name: [] for name in names})


def _columns(names: tuple[str, ...], x: Inline, *others: Inline) -> dict[str, Any]:
    """Return the columns of a source, which are empty if it contains only steps."""
    columns = (x, *others) if len(others[0]) else ([] for _ in names)
    return dict(zip(names, columns, strict=True))


def _title(shown: Shown, place: int) -> str:
    at = shown.at
    one = f"sample {at.sample}"
    of = one if at.sample is not None else f"batch {BATCH_LABELS[at.batch].lower()}"
    return f"{pass_label(at.gradient) if place else 'forward'} \u00b7 {at.statistic} \u00b7 {of}"
