"""Losses and recorded KPIs over steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from comgra_decl.viewer.model.runview import RunView, Slot, Steps
from comgra_decl.viewer.model.series import WIDE, Floats, Window, bounds, drawn, log10
from comgra_decl.viewer.model.stretches import line_of

_SECONDS = (("s", 1.0), ("ms", 1e-3))
_BYTES = (("GB", 1e9), ("MB", 1e6))
_PHASES = ("data", "forward", "backward", "optimizer")
_UNITS = {
    **{f"time/{part}": _SECONDS for part in ("step", *_PHASES)},
    **{f"device/{part}": _SECONDS for part in _PHASES},
    **{f"memory/{place}": _BYTES for place in ("host", "device")},
}
"""Units of the automatic metrics, the largest first, and their sizes in seconds or bytes."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, such as the training loss."""

    label: str
    steps: Steps
    values: Floats


@dataclass(frozen=True, slots=True)
class Chart:
    """All lines of one KPI on the same axes.

    `bounds` is the value range to show, and `unit` the unit of the values, "" if it is not known.
    """

    title: str
    lines: tuple[Line, ...]
    bounds: tuple[float, float]
    unit: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit: "memory/host (MB)"."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def logarithmic(self) -> Chart:
        """Return the chart in powers of ten; non-positive values become gaps."""
        lines = [replace(line, values=log10(line.values)) for line in self.lines]
        return replace(_chart(self.title, lines), unit=self.unit)


def charts(view: RunView, *, points: int = WIDE, within: Window | None = None) -> tuple[Chart, ...]:
    """Return one chart per loss and KPI, with one line per step type.

    Lines with more than `points` points are thinned; see `drawn`.
    """
    if points != WIDE:
        return _charts(view, points, within)
    return view.now(("charts", within), lambda: _charts(view, points, within))


def _charts(view: RunView, points: int, within: Window | None) -> tuple[Chart, ...]:
    every = _every_line(view)
    charts = [(title, [_thinned(line, points, within) for line in lines]) for title, lines in every]
    return tuple(_in_unit(title, lines) for title, lines in charts)


def _thinned(line: Line, points: int, within: Window | None) -> Line:
    keep = drawn(line.steps, line.values, points, within)
    return replace(line, steps=line.steps[keep], values=line.values[keep])


def _every_line(view: RunView) -> list[tuple[str, list[Line]]]:
    """Return all lines by chart title, losses first."""
    losses: dict[str, list[Line]] = {}
    others: dict[str, list[Line]] = {}
    titles = {_title(slot) for slot in _losses(view)}
    for key, part in view.run.kpis(automatic=True).groupby(["name", "type"], sort=False):
        name, label = map(str, cast("tuple[str, str]", key))
        steps, values = part["step"].to_numpy(), part["value"].to_numpy(float)
        is_loss = name in titles or name.partition("[")[0] == "loss"
        _add(losses if is_loss else others, name, Line(label, steps, values))
    for slot in _losses(view):  # losses without a curve over all steps, such as evaluations
        for type_ in view.run.types:
            steps, values = line_of(view, slot, "mean", "mean", type_)
            _add(losses, _title(slot), Line(type_, steps, values))
    return list({**losses, **others}.items())


def _losses(view: RunView) -> list[Slot]:
    return [slot for slot in view.slots.values() if slot.kind == "loss" and slot.pass_ == "forward"]


def _title(slot: Slot) -> str:
    """Return the title of a loss's chart, with a number if a step has several losses."""
    title = slot.node if slot.role == "output" else f"{slot.node} {slot.role}"
    return f"{title}[{slot.iteration}]" if slot.iteration else title


def _add(lines: dict[str, list[Line]], title: str, new: Line) -> None:
    known = ~np.isnan(new.values)
    logged = any(line.label == new.label for line in lines.get(title, ()))  # as a KPI
    if known.any() and not logged:
        steps, values = new.steps[known].astype(np.int64), new.values[known]
        lines.setdefault(title, []).append(Line(new.label, steps, values))


def _in_unit(title: str, lines: list[Line]) -> Chart:
    """Return a chart in a unit in which its numbers are short."""
    most = max((float(np.nanmax(np.abs(line.values), initial=0.0)) for line in lines), default=0.0)
    units = _UNITS.get(title, (("", 1.0),))
    unit, size = next((each for each in units if most >= each[1]), units[-1])
    if size != 1:
        lines = [replace(line, values=line.values / size) for line in lines]
    return replace(_chart(title, lines), unit=unit)


def _chart(title: str, lines: list[Line]) -> Chart:
    return Chart(title, tuple(lines), bounds(*(line.values for line in lines)))
