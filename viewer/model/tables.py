"""CSV files with the panes' data: every record at full precision, not thinned or scaled.

An empty cell means that nothing was recorded; `nan` and `inf` are recorded values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from comgra_decl.query import RunRow
from comgra_decl.viewer.model.compare import Pair, Ranking, counterpart, there_of
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.graph import Graph, node_values
from comgra_decl.viewer.model.kpis import charts
from comgra_decl.viewer.model.library import Library, Wanted
from comgra_decl.viewer.model.modules import module_tree
from comgra_decl.viewer.model.notes import notes
from comgra_decl.viewer.model.overview import overview
from comgra_decl.viewer.model.runview import RunView, Slot
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.series import Curve, curve, smoothed
from comgra_decl.viewer.model.sheet import Tensor
from comgra_decl.viewer.model.statistics import Cell, sample_table, statistics_table
from comgra_decl.viewer.model.takeaway import written
from comgra_decl.viewer.model.verdicts import found

_ALL = sys.maxsize
Line = list[str]


def series_csv(view: RunView, slot: Slot | None, at: Selection) -> bytes:
    """Return one line per record: the statistic, and its band or batch mean if shown."""
    line = curve(view, slot, at, points=_ALL)
    columns = {at.statistic: line.values, "low": line.low, "high": line.high,
               "batch mean": line.context}  # fmt: skip
    drawn = {name: values for name, values in columns.items() if len(values)}
    broken = set(line.broken.tolist())
    lines = (
        [str(step), *(_text(float(v[i]), recorded=step in broken) for v in drawn.values())]
        for i, step in enumerate(line.steps.tolist())
    )
    return written(["step", *drawn], lines)


def lines_csv(library: Library, wanted: Iterable[Wanted], smoothing: float) -> bytes:
    """Return one line per run and step: the value, its smoothed value, and the two other axes."""
    lines: list[Line] = []
    for one in wanted:
        numbers = library.get(one)
        if numbers is None:
            continue
        columns = (numbers.values, smoothed(numbers.values, smoothing), numbers.x("time"),
                   numbers.x("samples"))  # fmt: skip
        lines += (
            [one.run, str(step), *map(str, values)]
            for step, *values in zip(
                numbers.steps.tolist(), *(column.tolist() for column in columns), strict=True
            )
        )
    heads = ["run", "step", "value", "smoothed", "seconds", "samples"]
    return written(heads, lines)


def trials_csv(
    rows: Mapping[str, RunRow], settings: Sequence[str], metrics: Sequence[str]
) -> bytes:
    """Return one line per run: the settings that differ, and the last value of every metric."""
    lines = (
        [
            name,
            *(str(row.settings.get(setting, "")) for setting in settings),
            *(str(row.last.get(metric, "")) for metric in metrics),
        ]
        for name, row in rows.items()
    )
    return written(["run", *settings, *(f"last {metric}" for metric in metrics)], lines)


def distribution_csv(view: RunView, slot: Slot | None, at: Selection) -> bytes:
    """Return one line per bin of each record: its edges and its count."""
    header = ["step", "low", "high", "count"]
    if slot is None:
        return written(header, [])
    steps, counts, edges = view.histograms(slot, at.type)
    lines = (
        [str(step), _text(low), _text(high), str(count)]
        for step, ends, line in zip(steps.tolist(), edges.tolist(), counts.tolist(), strict=True)
        if all(map(math.isfinite, ends))
        for low, high, count in zip(ends, ends[1:], line, strict=False)
    )
    return written(header, lines)


def values_csv(tensor: Tensor) -> bytes:
    """Return one line per recorded value: its position and the number, formatted for its dtype."""
    names = [dim.name for dim in tensor.dims]
    if tensor.missing is not None:
        return written([*names, "value"], [])
    if tensor.fixed is not None:
        names = names[1:]
    lines = ([*map(str, place), str(value)] for place, value in np.ndenumerate(tensor.chosen))
    return written([*names, "value"], lines)


def overview_csv(view: RunView, at: Selection, pass_: str) -> bytes:
    """Return the selected statistic of a pass, one line per tensor and one column per record."""
    at = at.wide
    picture = overview(view, at, pass_)
    heads = ["node", "role", "iteration"]
    if picture is None:
        return written(heads, [])
    table = view.heat(at.statistic, pass_, at.over, at.type)
    counts = view.heat("nonfinite", pass_, "abs_max", at.type)
    lines = (
        [slot.node, slot.role, str(slot.iteration), *_cells(table, counts, slot.id)]
        for slot in picture.recorded
        if slot is not None
    )
    return written([*heads, *map(str, table.columns)], lines)


def kpi_csv(view: RunView, title: str) -> bytes:
    """Return one line for each logged value of a loss or KPI."""
    lines = (
        [line.label, str(step), _text(value, recorded=True)]
        for chart in charts(view, points=_ALL)
        if chart.title == title
        for line in chart.lines
        for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True)
    )
    return written(["type", "step", title], lines)


def stack_csv(table: pd.DataFrame) -> bytes:
    """Return one line per step or moment with each part of a stack."""
    heads = [str(table.index.name), *map(str, table)]
    return written(heads, ([str(at), *map(str, row)] for at, row in table.iterrows()))


def overlay_csv(view: RunView, slot: Slot | None, other: Other, at: Selection) -> bytes:
    """Return one line per record with the recorded values of both sides."""
    sides = [("this", curve(view, slot, at, points=_ALL))]
    if other.view is not None and other.is_apart(view, at):
        match, there = counterpart(other.view, slot), there_of(other, at)
        sides.append(("other", curve(other.view, match, there, points=_ALL)))
    lines = (line for side, drawn in sides for line in _curve_lines(side, drawn))
    return written(["side", "step", at.statistic], lines)


def graph_csv(view: RunView, at: Selection, graph: Graph, colour: str) -> bytes:
    """Return one line per node with its facts and the selected statistic of the displayed pass."""
    pass_ = colour if colour in ("forward", *view.gradient_passes()) else "forward"
    values = node_values(view, at, graph, pass_)
    lines = (
        [node.name, node.kind, node.title, str(values[node.name][0]) if node.name in values else ""]
        for node in graph.nodes
    )
    return written(["node", "kind", "title", f"{pass_} {at.wide.statistic}"], lines)


def statistics_csv(view: RunView, at: Selection) -> bytes:
    """Return all statistics of the selected tensor at the step, then those of each sample."""
    table, samples = statistics_table(view, at), sample_table(view, at)
    lines = [["batch", name, *map(_cell, cells)] for name, cells in table.rows]
    lines += [[f"sample {i}", at.statistic, *map(_cell, cells)] for i, cells in samples.rows]
    return written(["of", "statistic", *table.columns], lines)


def pairs_csv(rows: Iterable[tuple[str, Pair]]) -> bytes:
    """Return all statistics of a tensor for both sides."""
    lines = (
        [name, *map(_known, (pair.here, pair.there), pair.recorded), _text(pair.difference)]
        for name, pair in rows
    )
    return written(["statistic", "this", "other", "difference"], lines)


def ranking_csv(ranking: Ranking) -> bytes:
    """Return the tensors that differ most."""
    lines = (
        [row.slot.node, row.slot.role, str(row.slot.iteration), row.slot.pass_,
         _known(row.pair.here), _known(row.pair.there), _text(row.pair.relative)]
        for row in ranking.rows
    )  # fmt: skip
    return written(["node", "role", "iteration", "pass", "this", "other", "relative"], lines)


def modules_csv(view: RunView, at: Selection) -> bytes:
    """Return one line per module: its size, and its share of all changes."""
    lines = (
        [module.key[1] or module.label, module.module_class, str(module.count),
         str(module.trainable), _maybe(module.share), _maybe(module.ratio)]
        for module in module_tree(view, at).modules.values()
    )  # fmt: skip
    heads = ["module", "class", "parameters", "trainable", "share of change", "change / weights"]
    return written(heads, lines)


def findings_csv(view: RunView) -> bytes:
    """Return one line per finding, most important first."""
    known = found(view).diagnosis
    lines = (
        [f.rule, f.severity, *_place(f.place), str(f.first_step), str(f.last_step), f.message,
         f.advice, "" if f.after_step is None else str(f.after_step)]
        for f in (() if known is None else known.findings)
    )  # fmt: skip
    heads = ["rule", "severity", "node", "role", "iteration", "pass", "first step", "last step"]
    return written([*heads, "message", "advice", "after step"], lines)


def notes_csv(view: RunView) -> bytes:
    """Return one line per note."""
    return written(["step", "time", "note"], ([str(n.step), n.time, n.text] for n in notes(view)))


def _place(place: object) -> Line:
    return [str(getattr(place, name, "")) for name in ("node", "role", "iteration", "pass_")]


def _curve_lines(side: str, drawn: Curve) -> Iterable[Line]:
    broken = set(drawn.broken.tolist())
    for step, value in zip(drawn.steps.tolist(), drawn.values.tolist(), strict=True):
        yield [side, str(step), _text(value, recorded=step in broken)]


def _cells(table: pd.DataFrame, counts: pd.DataFrame, slot: int) -> Line:
    """Return one line of a `RunView.heat` table; `counts` contains the non-finite counts."""
    values, bad = (frame.loc[slot].to_numpy(float) for frame in (table, counts))
    return [_text(float(v), recorded=b > 0) for v, b in zip(values, bad, strict=True)]


def _cell(cell: Cell) -> str:
    return _known(cell.value, cell.recorded)


def _known(value: float, recorded: bool = True) -> str:
    return str(value) if recorded else ""


def _maybe(value: float | None) -> str:
    return "" if value is None else str(value)


def _text(value: float, *, recorded: bool = False) -> str:
    """Return the shortest decimal that identifies a number in its dtype; "" if it is missing."""
    return "" if math.isnan(value) and not recorded else str(value)
