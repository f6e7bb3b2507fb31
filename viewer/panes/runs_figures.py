"""Figures of several runs: lines on common axes, and settings against a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from bokeh.models import AllLabels, ColumnDataSource, MultiLine, Scatter, Text
from bokeh.models.formatters import CustomJSTickFormatter
from bokeh.models.tickers import FixedTicker

from comgra_decl.viewer.escaping import TEX
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.runs import X_AXES, Lines, Overlaid, Trials
from comgra_decl.viewer.model.series import bounds
from comgra_decl.viewer.palette import GREY
from comgra_decl.viewer.panes.figures import Frame, plainly
from comgra_decl.viewer.panes.hovering import Kind, Row
from comgra_decl.visible import visible

_TICK = """
return Number.isInteger(tick)
  ? tick.toLocaleString("en").replaceAll(",", "\u202f") : String(Number(tick.toPrecision(4)))
"""
_RUN = Row("run", "@run", "text")
_FEW = 50  # runs that are not ticked; the more there are, the fainter they are
_LONGEST = 22  # characters of the label of an axis or a tick


class LinesFigure:
    """One line per run, in the run's colour. A smoothed line has the original line behind it.

    A click on steps jumps there.

    Args:
        jump: Called with the step of a click.
    """

    def __init__(self, jump: Callable[[int], None]) -> None:
        self._jump, self._axis = jump, "step"
        self.frame = Frame(tooltips=[_RUN, Row("x", "$snap_x"), Row("value", "$snap_y")])
        self.frame.figure.xaxis.formatter = CustomJSTickFormatter(code=_TICK)
        self._raw, self._lines, self._dots = (
            _source("xs", "ys", "run", "colour") for _ in range(3)
        )
        figure = self.frame.figure
        plainly(figure, MultiLine(xs="xs", ys="ys", line_color="colour", line_alpha=0.25,
                                  line_width=1), self._raw)  # fmt: skip
        lines = plainly(figure, MultiLine(xs="xs", ys="ys", line_color="colour", line_width=1.6),
                        self._lines)  # fmt: skip
        plainly(figure, Scatter(x="xs", y="ys", fill_color="colour", line_color="colour", size=5),
                self._dots)  # fmt: skip
        self.frame.hover.tool.update(renderers=[lines], line_policy="nearest")
        self.frame.on_tap(self._tapped)
        self.panel = self.frame.pane()
        self._drawn: object = None

    def draw(
        self, lines: Lines, overlaid: Overlaid, *, colours: Mapping[str, str], log: bool
    ) -> None:
        """Draw all lines."""
        shown = lines.logarithmic() if log else lines
        self._axis = overlaid.x_axis
        self.frame.set_log(log)
        value = Row("value", "$snap_y", "power" if log else "number")
        label = X_AXES[overlaid.x_axis] + (f" ({lines.unit})" if lines.unit else "")
        kind: Kind = "number" if overlaid.x_axis == "time" else "step"
        self.frame.hover.put([_RUN, Row(label, "$snap_x", kind), value])
        smooth = overlaid.smoothing != "0"
        names = [visible(line.run) for line in shown.lines]
        tints = [colours[line.run] for line in shown.lines]
        xs, ys = [line.x for line in shown.lines], [line.y for line in shown.lines]
        raw = [line.raw for line in shown.lines]
        self._lines.data = {"xs": xs, "ys": ys, "run": names, "colour": tints}
        self._raw.data = (
            {"xs": xs, "ys": raw, "run": names, "colour": tints} if smooth else _empty(self._raw)
        )
        alone = [i for i, line in enumerate(shown.lines) if len(line.x) == 1]
        self._dots.data = {
            "xs": [xs[i][0] for i in alone],
            "ys": [ys[i][0] for i in alone],
            "run": [names[i] for i in alone],
            "colour": [tints[i] for i in alone],
        }
        self.frame.label(label, _note(lines))
        if shown.lines:
            usual = [_without_outliers(values) for values in raw] if smooth else []
            self.frame.show(x=_extent(xs), y=bounds(*ys, *usual))

    def _tapped(self, x: float, _: float) -> None:
        if self._axis == "step":
            self._jump(round(x))


_ABREAST, _SLANT = 40, 0.4
"""Number of letters that fit below parallel axes side by side; the angle of more, in radians."""

_CHIP = "#5b6472"
"""The colour below the values at parallel axes, so that lines do not cover them."""


class TrialsFigure:
    """Runs as points (one setting against the metric) or as lines over parallel axes.

    A click calls `tick` with the name of the nearest run.
    """

    def __init__(self, tick: Callable[[str], None]) -> None:
        self._tick = tick
        self._trials = Trials((), ())
        tooltips = [_RUN, Row("values", "@texts", "text")]
        self.frame = Frame(tooltips=tooltips, both=True)
        figure: Any = self.frame.figure
        self._points = _source("x", "y", "run", "colour", "alpha", "texts")
        self._lines = _source("xs", "ys", "run", "colour", "alpha", "texts")
        self._marks = _source("x", "y", "text")
        drawn = [
            plainly(figure, MultiLine(xs="xs", ys="ys", line_color="colour", line_alpha="alpha",
                                      line_width=1.6), self._lines),
            plainly(figure, Scatter(x="x", y="y", fill_color="colour", line_color=None,
                                    fill_alpha="alpha", size=9), self._points),
        ]  # fmt: skip
        chip: Any = {"background_fill_color": _CHIP, "background_fill_alpha": 0.85, "padding": 2,
                     "border_radius": 3}  # fmt: skip
        text = Text(x="x", y="y", text="text", text_align="center", text_color="white",
                    text_baseline="middle", text_font_size="11px", **chip)  # fmt: skip
        plainly(figure, text, self._marks)
        self.frame.hover.tool.update(renderers=drawn, line_policy="interp")
        figure.xaxis.major_label_policy = AllLabels()  # every axis has a name
        self.frame.on_tap(self._tapped)
        self.panel = self.frame.pane()

    def draw(self, trials: Trials, ticked: set[str], colours: Mapping[str, str]) -> None:
        """Draw all runs; those that are not ticked are faint and behind the others."""
        order = sorted(range(len(trials.runs)), key=lambda i: trials.runs[i] in ticked)
        trials = trials.ordered(order)
        self._trials = trials
        faint = 0.35 if len(order) <= _FEW else 0.12
        names = [visible(run) for run in trials.runs]
        look: dict[str, Any] = {
            "run": names,
            "colour": [colours[run] if run in ticked else GREY for run in trials.runs],
            "alpha": [0.95 if run in ticked else faint for run in trials.runs],
            "texts": [
                ", ".join(f"{scale.label}: {scale.texts[i]}" for scale in trials.scales)
                for i in range(len(names))
            ],
        }
        look["texts"] = [visible(text) for text in look["texts"]]
        parallel = len(trials.scales) != 2
        x, y = self._places()
        if parallel:
            self._points.data = _empty(self._points)
            self._lines.data = {"xs": list(x), "ys": list(y), **look}
        else:
            self._lines.data = _empty(self._lines)
            self._points.data = {"x": x[:, 0], "y": y[:, 0], **look}
        self._draw_axes(parallel)

    def _places(self) -> tuple[Any, Any]:
        """Return x and y of each run [runs, points]."""
        scales = self._trials.scales
        shape = len(scales), len(self._trials.runs)
        places = np.array([scale.places for scale in scales]).reshape(shape).T
        if len(scales) == 2:
            return places[:, :1], places[:, 1:]
        x = np.broadcast_to(np.arange(len(scales), dtype=float), places.shape)
        return x, places

    def _draw_axes(self, parallel: bool) -> None:
        scales = self._trials.scales
        figure: Any = self.frame.figure
        across: list[tuple[float, str]] = [(i, s.label) for i, s in enumerate(scales)]
        up: tuple[tuple[float, str], ...] = ()
        marks = [(float(i), at, text) for i, s in enumerate(scales) for at, text in s.ticks]
        x: tuple[float, float] = (-0.5, max(len(scales), 1) - 0.5)
        if not parallel:
            across, up, marks, x = list(scales[0].ticks), scales[1].ticks, [], (-0.06, 1.06)
        self._marks.data = {
            "x": [at for at, _, _ in marks],
            "y": [-0.06 if up_ == 0 else 1.06 if up_ == 1 else up_ for _, up_, _ in marks],
            "text": [_short(text) for _, _, text in marks],
        }
        for axis, ticks in ((figure.xaxis[0], across), (figure.yaxis[0], up)):
            axis.ticker = FixedTicker(ticks=[at for at, _ in ticks])
            axis.formatter = _labels([(at, _short(text)) for at, text in ticks])
        slanted = parallel and sum(len(text) for _, text in across) > _ABREAST
        figure.xaxis.major_label_orientation = _SLANT if slanted else "horizontal"
        figure.xgrid.grid_line_color = GREY if parallel else None
        figure.xgrid.grid_line_alpha = 0.5
        self.frame.label("" if parallel or not scales else scales[0].label)
        self.frame.label_left("" if parallel else scales[1].label)
        self.frame.show(x=x, y=(-0.12, 1.12))

    def _tapped(self, x: float, y: float) -> None:
        if not self._trials.runs:
            return
        xs, ys = self._places()
        if xs.shape[1] == 1:
            far = np.hypot(xs[:, 0] - x, ys[:, 0] - y)
        else:
            far = np.array([abs(np.interp(x, a, b) - y) for a, b in zip(xs, ys, strict=True)])
        if np.isfinite(far).any() and np.nanmin(far) < 0.08:
            self._tick(self._trials.runs[int(np.nanargmin(far))])


def _source(*columns: str) -> ColumnDataSource:
    return ColumnDataSource({name: [] for name in columns})


def _empty(source: ColumnDataSource) -> dict[str, Any]:
    return {str(name): [] for name in source.data}


def _labels(ticks: list[tuple[float, str]]) -> CustomJSTickFormatter:
    plain = {sign: "\u2009".join(sign) for sign in TEX}  # a tick label cannot be marked as plain
    texts = {}
    for at, text in ticks:
        for sign, broken in plain.items():
            text = text.replace(sign, broken)
        texts[f"{at:.6f}"] = text
    return CustomJSTickFormatter(code="return texts[tick.toFixed(6)] ?? ''", args={"texts": texts})


def _short(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}\u2026"


def _note(lines: Lines) -> str:
    parts = []
    if lines.loading:
        parts.append(f"{count(lines.loading)} still loading")
    if lines.lacking:
        parts.append(f"not recorded in {count(lines.lacking)} of the runs")
    if lines.left_out:
        parts.append(f"no room in memory for {count(lines.left_out)}")
    return ", ".join(parts)


def _without_outliers(values: Any) -> Any:
    """Return two quantiles, so that a few jumps do not flatten the smoothed line."""
    finite = values[np.isfinite(values)]
    return np.quantile(finite, [0.02, 0.98]) if len(finite) else finite


def _extent(xs: list[Any]) -> tuple[float, float]:
    low, high = min(float(x[0]) for x in xs), max(float(x[-1]) for x in xs)
    air = (high - low) * 0.015 or 0.5
    return low - air, high + air
