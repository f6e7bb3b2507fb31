"""All runs: their table, metrics and series of the ticked runs, and settings against a metric."""

from __future__ import annotations

from typing import Any, ClassVar

import panel as pn

from comgra_decl.query import RunRow
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.chooser import Chooser
from comgra_decl.viewer.components.runs_table import RunsTableView
from comgra_decl.viewer.model import runs as model
from comgra_decl.viewer.model.choices import Field, Groups, Option
from comgra_decl.viewer.model.labels import named, pass_label
from comgra_decl.viewer.model.library import Library
from comgra_decl.viewer.model.ranks import without_rank
from comgra_decl.viewer.model.selection import nearest
from comgra_decl.viewer.model.tables import lines_csv, trials_csv
from comgra_decl.viewer.panes.base import TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.runs_figures import LinesFigure, TrialsFigure
from comgra_decl.viewer.panes.selectors import offer
from comgra_decl.viewer.panes.sheet import ACROSS, NARROW

_GRID = """
:host {
  box-sizing: border-box; display: grid !important; gap: 10px 14px; padding: 8px 14px;
  --table: clamp(130px, 74px + 28px * var(--runs, 3), max(340px, 38vh));
  grid-template-columns: 190px repeat(3, minmax(0, 1fr));
  grid-template-rows: var(--table) minmax(260px, 1fr); min-height: calc(var(--table) + 290px);
}
.choices { contain: size; grid-row: 1 / span 2; min-height: 0; overflow: auto; }
.table { contain: size; grid-column: 2 / span 3; min-height: 0; min-width: 0; }
.scroll-button { display: none !important; }
@container (max-width: 1210px) {
  :host {
    grid-template-columns: 170px repeat(2, minmax(0, 1fr));
    grid-template-rows: var(--table) minmax(250px, 1fr) minmax(270px, 1fr);
    min-height: calc(var(--table) + 560px);
  }
  .choices { grid-row: 1 / span 3; }
  .table { grid-column: 2 / span 2; }
  .trials { grid-column: 2 / span 2; }
}
@container (max-width: 900px) {
  :host {
    grid-template-columns: minmax(0, 1fr);
    grid-template-rows: var(--table) max-content 250px 250px 270px;
    min-height: calc(var(--table) + 1050px);
  }
  .choices { contain: none; grid-row: 2; }
  .table, .trials { grid-column: 1; }
}
@media print { /* all runs, then the figures */
  :host { display: block !important; height: auto !important; }
  .choices { display: none !important; }
  .table { contain: none; height: auto !important; max-height: none !important; }
}
"""
_ALL_SETTINGS = Option("", "all that differ (parallel axes)")


class RunsPane(Pane):
    """The table of runs and the figures of the ticked ones."""

    reads: ClassVar = TENSOR | {
        "batch", "statistic", "pass_", "scale", "ticked", "smoothing", "x_axis", "metric",
        "against", "library",
    }  # fmt: skip

    def __init__(self, act: Act, library: Library) -> None:
        self._library = library
        self._tabled: object = None
        super().__init__(act)

    def build(self) -> Any:
        """Create the choices, the table and the figures."""
        self.choices = Chooser(sizing_mode="stretch_both", margin=0, stylesheets=[NARROW, ACROSS])
        self.choices.css_classes = ["choices"]
        self.choices.on_message(self._choose)
        self.table = RunsTableView(sizing_mode="stretch_both", margin=0, css_classes=["table"])
        self.table.on_message(self._on_table)
        self.metric, self.tensor = LinesFigure(self._jump), LinesFigure(self._jump)
        self.trials = TrialsFigure(self._toggle)
        self.trials.panel.css_classes = ["trials"]
        self.box = pn.Column(
            self.table, self.choices, self.metric.panel, self.tensor.panel, self.trials.panel,
            sizing_mode="stretch_both", margin=0, stylesheets=[_GRID],
        )  # fmt: skip
        return self.box

    def components(self) -> list[Any]:
        """Return the choices and the table, which handle clicks."""
        return [self.choices, self.table]

    def exhibits(self) -> list[Exhibit]:
        """Return the figures; their CSV contains every number of the ticked runs."""
        return [
            Exhibit(self.metric.frame.figure, "metric", lambda: self._csv(tensor=False)),
            Exhibit(self.tensor.frame.figure, "tensor", lambda: self._csv(tensor=True)),
            Exhibit(self.trials.frame.figure, "settings", self._trials_csv),
        ]

    def update(self, shown: Shown) -> None:
        """Update the table if runs were read, and the figures."""
        rows = self._library.rows()
        metrics, settings = model.all_metrics_in(rows), model.settings_in(rows)
        at = self._resolved(shown.overlaid, metrics, settings)
        self._names = self._library.names()
        self._ticked = model.ticked_of(at, self._names, without_rank(shown.run))
        self._colours = model.colours_of(self._names)
        self._put_table(rows, without_rank(shown.run))
        offer(self.choices, _choices(at, metrics, settings))
        log = shown.scale == "log"
        lines = model.metric_lines(self._library, self._ticked, at, at.metric)
        self.metric.frame.title = at.metric or "no metrics"
        self.metric.draw(lines, at, colours=self._colours, log=log)
        self.metric.frame.show_message("" if lines.lines else self._why(lines))
        lines = model.tensor_lines(self._library, self._ticked, at, at=shown.at, pass_=shown.pass_)
        self.tensor.frame.title = (
            f"{shown.at.statistic} of {named(shown.at)}, {pass_label(shown.pass_)}"
        )
        self.tensor.draw(lines, at, colours=self._colours, log=log)
        self.tensor.frame.show_message("" if lines.lines else self._why(lines))
        against = [at.against] if at.against else settings[: model.MOST_AXES]
        trials = model.trials_of(rows, at.metric, against)
        self.trials.frame.title = f"settings against the last {at.metric or 'metric'}"
        few = not against or not trials.runs
        self.trials.draw(
            trials if not few else model.Trials((), ()), {*self._ticked}, self._colours
        )
        self.trials.frame.show_message(
            ""
            if not few
            else "The runs do not differ in any setting."
            if trials.runs
            else "No runs."
        )

    @staticmethod
    def _why(lines: model.Lines) -> str:
        if lines.loading:
            return "Loading \u2026"
        return "None of the ticked runs recorded this." if lines.lacking else "Tick runs above."

    @staticmethod
    def _resolved(at: model.Overlaid, metrics: list[str], settings: list[str]) -> model.Overlaid:
        """Return the choices with values that exist."""
        metric = at.metric if at.metric in metrics else next(iter(metrics), "")
        against = at.against if at.against in settings else ""
        return model.Overlaid(at.ticked, at.smoothing, at.x_axis, metric, against)

    def _put_table(self, rows: dict[str, RunRow], shown: str) -> None:
        problems = self._library.problems()
        key = (tuple(map(id, rows.values())), tuple(problems))
        if key != self._tabled:
            self._tabled = key
            self._rows = rows  # keeps the rows alive, so that their ids stay theirs
            self.table.put(content=model.table_of(rows, problems).json(self._colours))
            styles = {"--runs": str(len(rows) + len(problems))}
            if self.box.styles != styles:
                self.box.styles = styles
        reading = len(self._names) - len(rows) - len(problems)
        self.table.put(ticked=list(self._ticked), shown=shown, reading=max(reading, 0))

    def _choose(self, message: Message) -> None:
        self.act(**message)

    def _on_table(self, message: Message) -> None:
        if "ticked" in message:
            self.act(ticked=tuple(message["ticked"]))
        else:
            self.act(run=message["open"], section="overview")

    def _toggle(self, run: str) -> None:
        kept = [name for name in self._ticked if name != run]
        self.act(ticked=tuple(kept if run in self._ticked else [*kept, run]))

    def _jump(self, step: int) -> None:
        if self._shown is not None:
            steps = self._shown.view.steps(self._shown.at.type)
            self.act(step=nearest(steps, step), follow=False)

    def _csv(self, *, tensor: bool) -> bytes:
        assert self._shown is not None
        shown = self._shown
        rows = self._library.rows()
        at = self._resolved(shown.overlaid, model.all_metrics_in(rows), [])
        wanted = (
            model.tensors_wanted(self._ticked, shown.at, shown.pass_)
            if tensor
            else model.metrics_wanted(self._ticked, at.metric)
        )
        return lines_csv(self._library, wanted, float(at.smoothing))

    def _trials_csv(self) -> bytes:
        rows = self._library.rows()
        return trials_csv(rows, model.settings_in(rows), model.metrics_in(rows))


def _choices(at: model.Overlaid, metrics: list[str], settings: list[str]) -> Groups:
    short = model.short_names(settings)
    lines = (
        Field("metric", "Metric", at.metric, tuple(Option(name, name) for name in metrics),
              "Metric shown in the first figure and in the figure of settings"),
        Field("smoothing", "Smoothing", at.smoothing,
              tuple(Option(each, each) for each in model.SMOOTHINGS),
              "Weight of earlier values in an exponential moving average with bias correction; "
              "faint lines show the original values", "slider"),
        Field("x_axis", "Horizontal axis", at.x_axis,
              tuple(Option(key, label) for key, label in model.X_AXES.items()),
              "Wall time and samples are known at recorded steps and interpolated between them"),
    )  # fmt: skip
    settings_field = Field(
        "against", "Settings", at.against,
        (_ALL_SETTINGS, *(Option(name, short[name]) for name in settings)),
        "A setting to plot against the last value of the metric, or all settings that differ",
    )  # fmt: skip
    return (("Lines", lines), ("Settings", (settings_field,)))
