"""What the training itself is measured by, over steps: losses and recorded KPIs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from comgra_decl.viewer.model.runview import RunView, Steps
from comgra_decl.viewer.model.series import POINTS, Floats, bounds, log10, thin


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, e.g. the training loss."""

    label: str
    steps: Steps
    values: Floats


@dataclass(frozen=True, slots=True)
class Chart:
    """All lines of one KPI, over the same axis; `bounds` is the range to show."""

    title: str
    lines: tuple[Line, ...]
    bounds: tuple[float, float]

    def logarithmic(self) -> Chart:
        """Returns the same chart in powers of ten; what is not positive leaves a gap."""
        lines = [replace(line, values=log10(line.values)) for line in self.lines]
        return _chart(self.title, lines)


def charts(view: RunView) -> tuple[Chart, ...]:
    """Returns one chart per loss and per KPI, each with a line per type of execution."""
    return view.now("charts", lambda: _charts(view))


def _charts(view: RunView) -> tuple[Chart, ...]:
    lines: dict[str, list[Line]] = {}
    for slot in view.slots.values():
        if slot.kind == "loss" and slot.pass_ == "forward":
            title = slot.node if slot.role == "output" else f"{slot.node} {slot.role}"
            if slot.iteration:
                title += f" \u00b7 iteration {slot.iteration}"
            for type_ in view.run.types:
                series = view.series(slot, "mean", "mean", type_)
                _add(lines, title, type_, np.asarray(series.index), np.asarray(series, float))
    kpis = view.run.kpis()
    for key, part in kpis.groupby(["name", "type"], sort=False):
        name, label = map(str, cast("tuple[str, str]", key))
        steps, values = part["step"].to_numpy(), part["value"].to_numpy(float)
        _add(lines, name, label, steps, values)
    return tuple(_chart(title, group) for title, group in lines.items())


def _add(
    lines: dict[str, list[Line]], title: str, label: str, steps: Steps, values: Floats
) -> None:
    known = ~np.isnan(values)
    told = any(line.label == label for line in lines.get(title, ()))  # a loss that is a KPI too
    if known.any() and not told:
        steps, values = steps[known].astype(np.int64), values[known]
        keep = thin(values, POINTS)
        lines.setdefault(title, []).append(Line(label, steps[keep], values[keep]))


def _chart(title: str, lines: list[Line]) -> Chart:
    return Chart(title, tuple(lines), bounds(*(line.values for line in lines)))
