"""Several runs, tensors and samples in HoloViews figures that are linked by brushing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import holoviews as hv
import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.chooser import Chooser
from comgra_decl.viewer.elements import as_lines, styled
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.linking import Links
from comgra_decl.viewer.model import runs as model
from comgra_decl.viewer.model.brushing import Brush
from comgra_decl.viewer.model.choices import Field, Groups, Option
from comgra_decl.viewer.model.labels import named, pass_label
from comgra_decl.viewer.model.library import Library
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.ranks import without_rank
from comgra_decl.viewer.palette import BLUE
from comgra_decl.viewer.panes.base import TENSOR, Act, Pane, Shown, html_view
from comgra_decl.viewer.panes.selectors import offer
from comgra_decl.viewer.panes.sheet import ACROSS, NARROW
from comgra_decl.viewer.plotting import RunPlots, SlotPlots
from comgra_decl.visible import visible

_GRID = """
:host {
  display: grid !important; gap: 10px 20px;
  flex: none !important; grid-template-columns: 190px repeat(2, minmax(0, 1fr)) !important;
  grid-template-rows: 280px 280px 420px; height: auto !important;
}
.choices { grid-row: 1 / span 2; height: fit-content !important; max-height: none !important; }
.layers { grid-column: 2 / span 2; }
.pane { height: auto !important; min-width: 0; }
.scroll-button { display: none !important; }
@container (max-width: 900px) {
  :host {
    grid-template-columns: minmax(0, 1fr) !important;
    grid-template-rows: max-content repeat(4, 280px) 420px;
  }
  .choices { grid-row: auto; }
  .layers { grid-column: 1; }
}
"""
_LEGEND = {
    "click_policy": "none", "label_height": 14, "glyph_height": 14, "margin": 0, "padding": 0,
    "spacing": 12,
}  # fmt: skip
_NAMED = 5
"""Most runs that have room in a legend; the tooltips name all, and *Runs* shows their colours."""

_TOOLS = ["box_select", "lasso_select"]
_USUAL = ["wheel_zoom", "reset", "save"]
"""Further tools: no more than fit beside a figure, because the rest would be in a menu."""

_KINDS = {"samples": "sample", "steps": "record", "runs": "run"}
"""What can be selected: fields of `Brush`, and what they count."""

_MARKED = {
    "samples": "the tables and the graph mark them",
    "steps": "the step bar marks them",
    "runs": "they are ticked in Runs",
}
_HIGH, _TALL = 280, 420
"""Heights of the figures in pixels, as in `_GRID`; below the layers, there are their names."""

_AXES = ("mean", "std")
"""Preferred statistics for the axes of the cloud."""


class ExplorePane(Pane):
    """Metrics and series of runs, settings, a cloud of samples, and distributions over layers."""

    reads: ClassVar = TENSOR | {
        "step", "batch", "statistic", "pass_", "ticked", "smoothing", "metric", "against",
        "library", "brush",
    }  # fmt: skip

    def __init__(self, act: Act, library: Library) -> None:
        self._library = library
        self._links = Links(act)
        super().__init__(act)

    def build(self) -> Any:
        """Create the choices, and an empty place for each figure."""
        self.choices = Chooser(
            sizing_mode="stretch_width", margin=0, stylesheets=[NARROW, ACROSS]
        )  # fmt: skip
        self.choices.css_classes = ["choices"]
        self.choices.on_message(self._choose)
        names = ("metric", "series", "settings", "cloud", "layers")
        self.figures = {name: _Figure(name, self._links) for name in names}
        return pn.Column(
            self.choices, *(figure.panel for figure in self.figures.values()),
            sizing_mode="stretch_width", margin=0, stylesheets=[_GRID],
        )  # fmt: skip

    def components(self) -> list[Any]:
        """Return the choices, which handle clicks."""
        return [self.choices]

    def update(self, shown: Shown) -> None:
        """Redraw the figures whose data has changed, and mark what is brushed."""
        if self._links.worn:
            self._links.forget()
            for figure in self.figures.values():
                figure.key = None
        self._links.mark(shown.brush)
        rows = self._library.rows()
        metrics, settings = model.all_metrics_in(rows), model.settings_in(rows)
        at = shown.overlaid
        metric = at.metric if at.metric in metrics else next(iter(metrics), "")
        against = at.against if at.against in settings else model.most_varied(rows, settings)
        at = replace(at, metric=metric, against=against, x_axis="step")
        offer(self.choices, _choices(at, metrics, settings, shown.brush))
        names = self._library.names()
        ticked = model.ticked_of(at, names, without_rank(shown.run))
        colours = model.colours_of(names)
        self._draw_lines(shown, at, ticked, colours)
        trials = model.trials_of(rows, metric, [against] if against else [])
        loading = len(rows) + len(self._library.problems()) < len(names)
        self.figures["settings"].draw(
            (metric, against, trials.runs, [s.texts for s in trials.scales], loading),
            lambda: _settings(trials, loading=loading),
        )
        point = (shown.view, shown.at.step, shown.at.type, shown.pass_, shown.at.iteration)
        tensor = (shown.at.node, shown.at.role)
        self.figures["cloud"].draw((*point, *tensor), lambda: _cloud(shown))
        statistic = shown.at.wide.statistic
        self.figures["layers"].draw((*point, statistic), lambda: _layers(shown, statistic))

    def _draw_lines(
        self, shown: Shown, at: model.Overlaid, ticked: Sequence[str], colours: dict[str, str]
    ) -> None:
        lines = model.metric_lines(self._library, ticked, at, at.metric)
        what = visible(at.metric) or "metric"
        key = (at.metric, at.smoothing, _stamp(lines))
        self.figures["metric"].draw(key, lambda: _curves(lines, what, what, colours))
        series = model.tensor_lines(self._library, ticked, at, at=shown.at, pass_=shown.pass_)
        statistic = shown.at.statistic
        title = f"{statistic} of {named(shown.at)}, {pass_label(shown.pass_)}"
        key = (title, at.smoothing, _stamp(series))
        self.figures["series"].draw(
            key, lambda: _curves(series, statistic, visible(title), colours)
        )

    def _choose(self, message: Message) -> None:
        cleared = _KINDS.keys() & message
        if cleared and self._shown is not None:
            self.act(brush=replace(self._shown.brush, **dict.fromkeys(cleared, ())))
        elif not cleared:
            self.act(**message)


class _Figure:
    """The place of one figure; `key` is what it shows."""

    def __init__(self, name: str, links: Links) -> None:
        self.key: object = None
        self._links = links
        self._note = html_view(visible=False)
        self._pane = pn.pane.HoloViews(  # type: ignore[no-untyped-call]
            None, backend="bokeh", sizing_mode="stretch_width", margin=0, linked_axes=False,
            height=_TALL if name == "layers" else _HIGH,
        )  # fmt: skip
        self._place = pn.Column(self._pane, sizing_mode="stretch_width", margin=0)
        self.panel = pn.Column(
            self._note, self._place, sizing_mode="stretch_width", margin=0,
            css_classes=["pane", name],
        )  # fmt: skip

    def draw(self, key: object, make: Callable[[], hv.Element | str]) -> None:
        """Draw an element, or show why there is none; does nothing if the key is the same."""
        if key == self.key:
            return
        self.key = key
        self._links.begin(self)
        made = make()
        missing = isinstance(made, str)
        if missing:
            self._note.html = f'<div class="notice"><p>{_e(made)}</p></div>'
        else:
            self._pane.object = self._links.link(made)
        self._note.visible, self._place.visible = missing, not missing


def _stamp(lines: model.Lines) -> object:
    """Return what distinguishes these lines from other lines of the same thing."""
    return lines.loading, [(line.run, len(line.x), *line.x[-1:]) for line in lines.lines]


def _curves(
    lines: model.Lines, dimension: str, title: str, colours: dict[str, str]
) -> hv.NdOverlay | str:
    """Return a line for each run, keyed by `run`, over `step`."""
    if not lines.lines:
        return "Loading \u2026" if lines.loading else "None of the ticked runs recorded this."
    curves = {
        visible(line.run): styled(
            as_lines(hv.Curve((line.x, line.y), "step", dimension)),
            "Curve", {"color": colours[line.run]},
            bokeh={"tools": ["hover", "box_select"], "default_tools": _USUAL},
        )
        for line in lines.lines
    }  # fmt: skip
    overlay = hv.NdOverlay(curves, kdims=["run"], sort=False)
    look = {"title": title, "legend_position": "top", "show_legend": len(curves) <= _NAMED}
    frame = {"height": _HIGH, "legend_opts": _LEGEND, "default_tools": _USUAL}
    return styled(overlay, "NdOverlay", look, bokeh=frame)


def _settings(trials: model.Trials, *, loading: bool) -> hv.Points | str:
    """Return the runs as points: a setting, and the last value of the metric."""
    if len(trials.scales) < 2:
        return "Loading \u2026" if loading else "The runs do not differ in any setting."
    if not trials.runs:
        return "No run has this metric."
    x, y = trials.scales
    vertical = visible(y.label)
    horizontal = visible(x.label) if x.label != y.label else f"{visible(x.label)} (setting)"
    points = hv.Points(
        (x.places, y.places, *([*map(visible, each)] for each in (trials.runs, x.texts, y.texts))),
        kdims=["setting", "result"],
        vdims=["run", horizontal, vertical],
        label=f"{vertical} against {horizontal}",
    )
    across, down = ([(at, visible(text)) for at, text in scale.ticks] for scale in (x, y))
    look = {
        "color": BLUE, "xlabel": horizontal, "ylabel": vertical, "xticks": across, "yticks": down,
        "xlim": (-0.06, 1.06), "ylim": (-0.06, 1.06),
    }  # fmt: skip
    return styled(
        points, "Points", look,
        bokeh={
            "height": _HIGH, "size": 8, "tools": ["hover", *_TOOLS], "default_tools": _USUAL,
            "hover_tooltips": ["run", horizontal, vertical],  # not the places along the axes
        },
    )  # fmt: skip


def _cloud(shown: Shown) -> hv.Points | hv.DynamicMap | str:
    at, run = shown.at, shown.view.run
    offered = run.statistics
    wanted = [name for name in _AXES if name in offered]
    x, y, *_ = [*wanted, *(name for name in offered if name not in wanted), *offered]
    if at.step is None:
        return "There are no records."
    try:
        slot = run.slot(at.node, role=at.role, of=shown.pass_, iteration=at.iteration)
        points = SlotPlots(slot).cloud(at.step, x=x, y=y, type=at.type or None)
    except ComgraError as error:
        return str(error)
    if len(points) < 2:
        return "No samples of this tensor were recorded at this step."
    frame = {"height": _HIGH, "responsive": True}
    return points.opts(hv.opts.Points(tools=["hover", *_TOOLS], backend="bokeh", **frame))


def _layers(shown: Shown, statistic: str) -> hv.Overlay | str:
    at = shown.at
    try:
        return RunPlots(shown.view.run).distributions(
            statistic, step=at.step, of=shown.pass_, iteration=at.iteration, type=at.type or None
        )
    except ComgraError as error:
        return str(error)


def _choices(at: model.Overlaid, metrics: list[str], settings: list[str], brush: Brush) -> Groups:
    short = model.short_names(settings)
    lines = (
        Field("metric", "Metric", at.metric, tuple(Option(name, name) for name in metrics),
              "Metric shown in the first figure and against the setting"),
        Field("smoothing", "Smoothing", at.smoothing,
              tuple(Option(each, each) for each in model.SMOOTHINGS),
              "Weight of earlier values in an exponential moving average with bias correction",
              "slider"),
        Field("against", "Setting", at.against,
              tuple(Option(name, short[name]) for name in settings),
              "A setting in which the runs differ, plotted against the last value of the metric"),
    )  # fmt: skip
    return (("Lines", lines), ("Selected", tuple(_clearing(brush))))


def _clearing(brush: Brush) -> Iterator[Field]:
    """Yield a button for each kind of selection that removes it."""
    for name, of in _KINDS.items():
        size = len(getattr(brush, name))
        text = f"Clear {count(size)} {of}{'s' * (size != 1)}" if size else "none yet"
        yield Field(
            name, f"{of.capitalize()}s", "", (Option("clear", text),),
            f"Drag a box in a figure to select {of}s; {_MARKED[name]}", "actions",
        )  # fmt: skip
