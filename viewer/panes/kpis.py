"""Losses and KPIs over training, and the time and memory of the measured steps."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import panel as pn
from bokeh.models import ColumnDataSource
from bokeh.models.annotations import LegendItem

from comgra_decl.viewer.model.kpis import Chart, charts
from comgra_decl.viewer.model.memory_use import memory_moments, memory_steps, part_colours
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import nearest
from comgra_decl.viewer.model.series import extent
from comgra_decl.viewer.model.tables import kpi_csv, stack_csv
from comgra_decl.viewer.model.time_use import phases
from comgra_decl.viewer.palette import LINES
from comgra_decl.viewer.panes.base import Act, Exhibit, Pane, Shown, html_view
from comgra_decl.viewer.panes.figures import Frame, legend, unit_range
from comgra_decl.viewer.panes.hovering import STEP, SUBJECT, Row
from comgra_decl.viewer.panes.stacks import StackFigure
from comgra_decl.visible import visible

_EMPTY = (
    '<div class="notice"><h2>No losses or KPIs yet</h2>'
    "<p>The loss appears here after the first backward pass.</p></div>"
)
_NONE = (
    '<div class="notice"><h2>No losses or KPIs</h2><p>This run had no backward pass and logged no '
    "KPIs. Log a value from your program with</p>"
    "<pre>comgra_decl.kpi(&quot;accuracy&quot;, value)</pre></div>"
)

_FEW = 300
"""Maximum number of points for which a line has markers. More markers would hide the line."""

TIMES = "time per profiled step (ms)"
"""Title of the figure with the time of each phase."""

STEPS = "memory per measured step (MB)"
"""Title of the figure with what the memory contains in each step."""

MOMENTS = "memory over step {} (MB)"
"""Title of the figure with what the memory contains at each moment of a step."""

_GRID = """
:host {
  display: grid !important; gap: 10px 20px; grid-auto-rows: minmax(250px, 1fr); overflow: visible;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, max(480px, 24cqw)), 1fr));
}
.bk-Figure { height: auto !important; min-height: 250px; min-width: 0; }
"""


class KpisPane(Pane):
    """One figure per KPI with one line per step type. A click jumps to that step.

    If the run has a profile, another figure has one bar per profiled step, split into phases. If
    memory was measured, two figures have one bar per step and one per moment of a step. Shows at
    most `most` figures, losses first.
    """

    reads: ClassVar = frozenset({"run", "revision", "type", "step", "scale"})

    def __init__(self, act: Act, *, most: int | None = None) -> None:
        self._most = most
        super().__init__(act)

    def build(self) -> Any:
        """Create an empty grid. Figures are added once there are KPIs."""
        self._figures: dict[str, _KpiFigure] = {}
        self._stacks: dict[str, StackFigure] = {}
        self._x_range = unit_range()
        self._drawn: object = None
        self._empty = html_view()
        self._empty.html = _EMPTY
        # Not a column, which would be at least as high as all figures below each other.
        self._grid = pn.Row(sizing_mode="stretch_both", margin=0, stylesheets=[_GRID])
        return pn.Column(self._empty, self._grid, sizing_mode="stretch_both", margin=0)

    def exhibits(self) -> list[Exhibit]:
        """Return the figures; their CSV contains every number."""
        found = [
            Exhibit(drawn.frame.figure, name, partial(self._csv, name))
            for name, drawn in self._figures.items()
        ]
        for title, drawn in self._stacks.items():
            found.append(Exhibit(drawn.frame.figure, title, partial(stack_csv, drawn.table)))
        return found

    def _csv(self, name: str) -> bytes:
        assert self._shown is not None
        return kpi_csv(self._shown.view, name)

    def update(self, shown: Shown) -> None:
        """Redraw the lines if there are new records. Always moves the step markers."""
        within = next((d.frame.window for d in self._figures.values()), None)
        self._empty.put(html=_EMPTY if shown.view.run.state in ("live", "waiting") else _NONE)
        key = (shown.view, shown.view.revision, shown.scale, within)
        if key != self._drawn:
            known = charts(shown.view, within=within)[: self._most]
            self._draw(known, shown, log=shown.scale == "log")
            self._drawn = key
        for drawn in self._figures.values():
            drawn.frame.mark_step(shown.at.step)

    def _draw(self, known: tuple[Chart, ...], shown: Shown, *, log: bool) -> None:
        if self._most is None:
            self._stack(shown.view)
        names = [chart.title for chart in known]
        if names != list(self._figures):
            self._figures = {name: self._figures.get(name) or self._figure(name) for name in names}
        panels = [drawn.panel for drawn in self._figures.values()]
        panels += [drawn.panel for drawn in self._stacks.values()]
        self._empty.visible = not panels
        self._grid.visible = bool(panels)
        if panels != self._grid.objects:
            self._grid.objects = panels
        steps = extent(*(line.steps for chart in known for line in chart.lines))
        for chart in known:
            self._figures[chart.title].draw(chart, steps, log)

    def _stack(self, view: RunView) -> None:
        """Draw the figures of what was measured in some steps."""
        tables = {TIMES: phases(view), STEPS: memory_steps(view)}
        moments = memory_moments(view)
        if moments is not None:
            tables[MOMENTS.format(moments[0])] = moments[1]
        before, self._stacks = self._stacks, {}
        for title, table in tables.items():
            if table is None or table.empty:
                continue
            drawn = before.get(title)
            if drawn is None or [*drawn.table] != [*table]:
                colours = part_colours(map(str, table))
                words = ("phase", "time") if title == TIMES else ("part", "size")
                drawn = StackFigure(title, colours, (str(table.index.name), *words))
            drawn.draw(table, "ms" if title == TIMES else "MB")
            self._stacks[title] = drawn

    def _figure(self, name: str) -> _KpiFigure:
        made = _KpiFigure(name, self._x_range, self._jump)
        made.frame.on_zoom(self.again)
        return made

    def _jump(self, x: float, _: float) -> None:
        if self._shown is not None:
            steps = self._shown.view.steps(self._shown.at.type)
            self.act(step=nearest(steps, round(x)), follow=False)


class _KpiFigure:
    """Figure of one KPI."""

    def __init__(self, title: str, x_range: Any, jump: Any) -> None:
        tooltips = [SUBJECT, Row("type", "@label", "text"), STEP, Row("value", "@value")]
        self.frame = Frame(x_range=x_range, tooltips=tooltips)
        self.frame.hover.name(title)
        self.frame.on_tap(jump)
        self.panel = self.frame.pane()
        self._lines: dict[str, tuple[ColumnDataSource, Any]] = {}
        self._legend: Any = legend([], visible=False)
        self.frame.figure.add_layout(self._legend)
        self.frame.hover.along([])

    def draw(self, chart: Chart, x: tuple[float, float], log: bool) -> None:
        """Draw all lines of a chart."""
        shown = chart.logarithmic() if log else chart
        self.frame.title = chart.heading
        self.frame.set_log(log)
        for line, recorded in zip(shown.lines, chart.lines, strict=True):
            source, dots = self._lines.get(line.label) or self._add(line.label)
            dots.size = 4 if len(line.steps) <= _FEW else 2
            labels = [visible(line.label)] * len(line.steps)
            source.data = {
                "x": line.steps, "y": line.values, "value": recorded.values, "label": labels
            }  # fmt: skip
        self.frame.show(x=x, y=shown.bounds)

    def _add(self, label: str) -> tuple[ColumnDataSource, Any]:
        colour = LINES[len(self._lines) % len(LINES)]
        source = ColumnDataSource({"x": [], "y": [], "value": [], "label": []})
        fig: Any = self.frame.figure
        line = fig.line("x", "y", source=source, line_color=colour, line_width=1.6)
        dots = fig.scatter("x", "y", source=source, size=4, color=colour)
        self.frame.hover.along([*fig.hover.renderers, line])
        self._legend.items = [
            *self._legend.items,
            LegendItem(label=visible(label), renderers=[line, dots]),
        ]
        self._legend.visible = len(self._legend.items) > 1
        self._lines[label] = source, dots.glyph
        return self._lines[label]
