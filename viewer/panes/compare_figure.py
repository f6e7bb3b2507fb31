"""The same series of two runs over the same axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.models.annotations import LegendItem, Span

from comgra_decl.viewer.model.compare import Overlay
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.labels import named
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import Curve, extent
from comgra_decl.viewer.palette import BLUE, ORANGE
from comgra_decl.viewer.panes.figures import Frame, legend
from comgra_decl.viewer.panes.hovering import STEP, SUBJECT, Row

_COLUMNS = ("x", "y", "value", "side")
_SIDES = (("this", BLUE), ("other", ORANGE))


class OverlayFigure:
    """A figure with one line per side and a marker at each side's step; a click jumps to a step."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        tooltips = [SUBJECT, Row("side", "@side", "text"), STEP, Row("value", "@value")]
        self.frame = Frame(tooltips=tooltips)
        self.sources = [ColumnDataSource({name: [] for name in _COLUMNS}) for _ in _SIDES]
        fig: Any = self.frame.figure
        self.frame.hover.along([])
        items = []
        for (side, colour), source in zip(_SIDES, self.sources, strict=True):
            dash = "solid" if side == "this" else [6, 3]
            line = fig.line("x", "y", source=source, line_color=colour, line_width=1.7,
                            line_dash=dash)  # fmt: skip
            fig.scatter("x", "y", source=source, size=4, color=colour)
            self.frame.hover.along([*fig.hover.renderers, line])
            items.append(LegendItem(label=side, renderers=[line]))
        self._legend: Any = legend(items)
        fig.add_layout(self._legend, "above")  # inside, it would lie on the curves
        self.there = Span(location=0, dimension="height", line_color=ORANGE, line_width=1.5,
                          line_dash=[5, 3], level="overlay", visible=False)  # fmt: skip
        fig.add_layout(self.there)
        self.frame.on_tap(lambda x, _: jump(x))
        self.panel = self.frame.pane()

    def draw(self, overlay: Overlay, other: Other, *, at: Selection, log: bool, axis: str) -> None:
        """Draw both series and both step markers."""
        lines = [overlay.here, overlay.there]
        drawn = [None if line is None else line.logarithmic() if log else line for line in lines]
        for source, line, raw, (side, _) in zip(self.sources, drawn, lines, _SIDES, strict=True):
            data = _data(line, raw, side)
            if not _same(data, source.data):
                source.data = data
        known = [line for line in drawn if line is not None and len(line.steps)]
        self._legend.visible = overlay.there is not None
        self.frame.set_log(log)
        self.frame.hover.name(named(at))
        self.frame.title = at.statistic + (" \u00f7 start" if axis == "relative" else "")
        if known:
            y = _joined(known) if log else overlay.bounds
            self.frame.show(x=extent(*(line.steps for line in known)), y=y)
        missing = [line.missing for line in drawn if line is not None]
        self.frame.show_message(overlay.here.missing if len(known) == 0 else "")
        missing_text = next((text for text in missing if text), "") if known else ""
        self.frame.label(missing_text)
        self.frame.mark_step(at.step)
        apart = other.step is not None and (other.step != at.step)
        self.there.update(location=other.step or 0, visible=apart)


def _data(line: Curve | None, raw: Curve | None, side: str) -> dict[str, Any]:
    if line is None or raw is None:
        return {name: [] for name in _COLUMNS}
    return {
        "x": line.steps,
        "y": line.values,
        "value": raw.values,
        "side": [side] * len(line.steps),
    }


def _same(data: dict[str, Any], shown: Any) -> bool:
    """Return whether the lines are already shown; if so, a step change sends no lines."""
    return all(np.array_equal(data[k], shown[k], equal_nan=True) for k in ("x", "y", "value"))


def _joined(lines: list[Curve]) -> tuple[float, float]:
    return min(line.bounds[0] for line in lines), max(line.bounds[1] for line in lines)
