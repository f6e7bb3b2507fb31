"""One statistic of the selected tensor over the training; a click jumps to that step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from bokeh.models import ColumnDataSource, Line, Range1d, Scatter, VArea

from comgra_decl.viewer.model.selection import nearest, slots_of
from comgra_decl.viewer.model.series import Curve, curve
from comgra_decl.viewer.model.tables import series_csv
from comgra_decl.viewer.model.words import BATCH_LABELS, pass_label
from comgra_decl.viewer.palette import BLUE, GREY, ORANGE, RED
from comgra_decl.viewer.panes.base import PASSES, TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import Frame, plainly

_FEW = 60
"""Points up to which each is marked; more would hide their line."""


class SeriesPane(Pane):
    """The series of one pass: 0 is the forward one, 1 the chosen gradient."""

    reads: ClassVar = TENSOR | {"step", "gradient", "batch", "statistic", "scale"}

    def __init__(self, act: Act, *, place: int, x_range: Range1d) -> None:
        self._place = place
        self._x_range = x_range
        self._drawn: object = None
        self._shown: Shown | None = None
        super().__init__(act)

    def build(self) -> Any:
        """Makes the figure: context, band, line, broken points."""
        tooltips = [("step", "@x"), ("value", "@value{0.0000e}")]
        self.frame = Frame(x_range=self._x_range, tooltips=tooltips)
        colour = ORANGE if self._place else BLUE
        columns = ("x", "y", "value", "low", "high", "context")
        self._line = ColumnDataSource({name: [] for name in columns})
        self._broken = ColumnDataSource({"x": [], "y": [], "value": []})
        fig = self.frame.figure
        band = VArea(x="x", y1="low", y2="high", fill_color=colour, fill_alpha=0.16)
        plainly(fig, band, self._line)
        plainly(fig, Line(x="x", y="context", line_color=GREY, line_alpha=0.7), self._line)
        main = plainly(fig, Line(x="x", y="y", line_color=colour, line_width=1.6), self._line)
        dot = Scatter(x="x", y="y", size=5, line_color=colour, fill_color=colour)
        self._dots = plainly(fig, dot, self._line)
        cross = Scatter(x="x", y="y", marker="x", size=8, line_color=RED, line_width=2)
        broken = plainly(fig, cross, self._broken)
        fig.hover.renderers = [main, broken]
        fig.hover.update(line_policy="nearest", mode="vline")
        self.frame.on_tap(self._jump)
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """The figure; its file holds every record."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} series", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        view, at = self._shown.view, self._shown.at
        return series_csv(view, slots_of(view, at)[self._place], at)

    def update(self, shown: Shown) -> None:
        """Redraws the line if the tensor or statistic changed; always moves the step marker."""
        self._shown = shown
        at = shown.at
        key = (shown.view, shown.view.revision, at.type, at.node, at.role, at.iteration,
               at.gradient, at.batch, at.statistic, shown.scale)  # fmt: skip
        if key != self._drawn:
            slot = slots_of(shown.view, at)[self._place]
            line = curve(shown.view, slot, at)
            self._draw(line, line.logarithmic() if shown.scale == "log" else line, shown)
            self._drawn = key
        self.frame.mark_step(at.step)

    def _draw(self, recorded: Curve, line: Curve, shown: Shown) -> None:
        self.frame.title = _title(shown, self._place)
        columns = {
            "y": line.values, "value": recorded.values, "low": line.low, "high": line.high,
            "context": line.context,
        }  # fmt: skip
        empty = np.full(len(line.steps), np.nan)
        with np.errstate(over="ignore"):  # as they are stored, half of the bytes
            drawn = {n: (v if len(v) else empty).astype(np.float32) for n, v in columns.items()}
        self._line.data = {"x": line.steps, **drawn}
        bottom = line.bounds[0] + 0.03 * (line.bounds[1] - line.bounds[0])
        count = len(line.broken)  # lists, because each array is a message of its own
        self._broken.data = {
            "x": line.broken.tolist(), "y": [bottom] * count, "value": [float("nan")] * count
        }  # fmt: skip
        self._dots.visible = len(line.steps) <= _FEW
        self.frame.set_log(shown.scale == "log")
        self.frame.show(x=_extent(shown), y=line.bounds)
        self.frame.say(line.missing)

    def _jump(self, x: float, _: float) -> None:
        if self._shown is not None:
            steps = self._shown.view.steps(self._shown.at.type)
            self.act(step=nearest(steps, round(x)), follow=False)


def _extent(shown: Shown) -> tuple[float, float]:
    """Returns the x range of all steps, so that all figures of a tensor share it."""
    steps = shown.view.steps(shown.at.type)
    if len(steps) == 0:
        return 0.0, 1.0
    low, high = float(steps[0]), float(steps[-1])
    air = (high - low) * 0.015 or 0.5
    return low - air, high + air


def _title(shown: Shown, place: int) -> str:
    at = shown.at
    one = f"sample {at.sample}"
    of = one if at.sample is not None else f"batch {BATCH_LABELS[at.batch].lower()}"
    return f"{pass_label(at.gradient) if place else 'forward'} \u00b7 {at.statistic} \u00b7 {of}"
