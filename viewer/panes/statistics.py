"""Facts about the selected tensor, all its statistics, and its samples."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.labels import STATISTIC_HELP, order_of_operations
from comgra_decl.viewer.model.numbers import MISSING, number, shape, signed
from comgra_decl.viewer.model.selection import slots_of
from comgra_decl.viewer.model.statistics import (
    Cell,
    SampleTable,
    StatisticsTable,
    sample_table,
    statistics_table,
)
from comgra_decl.viewer.model.tables import statistics_csv
from comgra_decl.viewer.palette import BLUE, ORANGE
from comgra_decl.viewer.panes.base import (
    SAVE,
    TENSOR,
    Pane,
    Shown,
    hand_table,
    html_view,
    save_button,
)

_CLASSES = ("forward", "gradient", "update")
_COMPARED = 2  # number of columns compared with the previous record


class StatisticsPane(Pane):
    """The forward pass, the gradient and the update side by side.

    A click on a row selects a statistic or sample.
    """

    reads: ClassVar = TENSOR | {"step", "gradient", "batch", "statistic", "brush"}

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view(sizing_mode="stretch_both", css_classes=["statistics"])
        self.view.on_message(self._choose)
        return self.view

    def components(self) -> list[Any]:
        """Return the table, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the whole content, which is a few kilobytes."""
        table = statistics_table(shown.view, shown.at)
        samples = sample_table(shown.view, shown.at)
        tokens = [f"statistic:{name}" for name, _ in table.rows]
        tokens += [f"batch:{sample}" for sample, _ in samples.rows] + ["batch:mean", SAVE]
        content = _head(shown) + _statistics(table, shown) + _samples(samples, shown)
        step = "" if shown.at.step is None else str(shown.at.step)
        at = shown.at
        marks = f'data-node="{_raw(at.node)}" data-step="{step}" data-batch="{_raw(at.batch)}"'
        marks += f' data-statistic="{_raw(at.statistic)}"'
        self.view.put(html=f"<article {marks}>{content}</article>", tokens=tokens)

    def _choose(self, message: Message) -> None:
        name, _, value = message["send"].partition(":")
        if message["send"] != SAVE:
            self.act(**{name: value})
        elif self._shown is not None:
            shown = self._shown
            table = statistics_csv(shown.view, shown.at)
            hand_table(self.view, shown.at, "statistics", table)


def _head(shown: Shown) -> str:
    at, view = shown.at, shown.view
    slot = next((slot for slot in slots_of(view, at) if slot is not None), None)
    if slot is None:
        return f'<div class="node-title"><h2>{_e(at.node)}</h2></div>'
    role = "" if slot.role == "output" else f'<span class="soft">{_e(slot.role)}</span>'
    facts = [slot.kind, slot.module_class, shape(view.shape(slot, at)), slot.dtype]
    if slot.batch_dim is not None:
        facts.append(f"batch dim {slot.batch_dim}")
    chips = "".join(f'<span class="chip">{_e(fact)}</span>' for fact in facts if fact)
    shared = [name for name in slot.names if name != slot.node]
    note = f'<p class="note">Also called {_e(", ".join(shared))}.</p>' if shared else ""
    save = save_button("these statistics")
    return f'<div class="node-title"><h2>{_e(at.node)}</h2>{role}{chips}{save}</div>{note}'


def _statistics(table: StatisticsTable, shown: Shown) -> str:
    compared = "no previous record" if table.before is None else f"change since step {table.before}"
    delta = f'<th title="{compared}">\u0394</th>'
    heads = "".join(
        f'<th><span class="{_CLASSES[i]}">{_e(column)}</span></th>{delta * (i < _COMPARED)}'
        for i, column in enumerate(table.columns)
    )
    lines = "".join(_statistic_line(name, cells, shown) for name, cells in table.rows)
    return (
        f'<table class="stats"><thead><tr><th>statistic</th>{heads}</tr></thead>'
        f'<tbody>{lines}</tbody></table><p class="note">{_order(shown)}</p>'
    )


def _order(shown: Shown) -> str:
    """Return how the selected value was computed, first per sample and then over the batch."""
    at = shown.at
    batched = any(s is not None and s.batch_dim is not None for s in slots_of(shown.view, at))
    alone = STATISTIC_HELP.get(at.statistic, "defined in the run's spec")
    how = order_of_operations(at.statistic, at.batch) if batched else alone
    return f"{_e(at.statistic)}: {_e(how)}"


def _statistic_line(name: str, cells: tuple[Cell, ...], shown: Shown) -> str:
    chosen = ' class="chosen" aria-selected="true"' if name == shown.at.statistic else ""
    explained = order_of_operations(name, shown.at.batch)
    columns = "".join(
        f"<td>{cell_html(cell, alarm=name == 'nonfinite')}</td>"
        + (f'<td class="change">{_change(cell)}</td>' if i < _COMPARED else "")
        for i, cell in enumerate(cells)
    )
    return (
        f'<tr{chosen} data-send="statistic:{_raw(name)}" tabindex="0" title="{_e(explained)}">'
        f"<td>{_e(name)}</td>{columns}</tr>"
    )


def _samples(table: SampleTable, shown: Shown) -> str:
    title = f"<h3>{_e(shown.at.statistic)} per sample</h3>"
    if table.missing:
        return f'{title}<p class="note">{_e(table.missing)}</p>'
    heads = "".join(
        f'<th><span class="{kind}">{_e(column)}</span></th>'
        for kind, column in zip(_CLASSES, table.columns, strict=False)
    )
    largest = [
        max((abs(c[i].value) for _, c in table.rows if math.isfinite(c[i].value)), default=0.0)
        for i in range(len(table.columns))
    ]
    lines = "".join(_sample_line(table, i, largest, shown) for i in range(len(table.rows)))
    return (
        f'{title}<table class="samples"><thead><tr><th>sample</th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _sample_line(table: SampleTable, i: int, largest: list[float], shown: Shown) -> str:
    sample, cells = table.rows[i]
    chosen = sample == shown.at.sample
    brushed = sample in shown.brush.samples
    mark = ' class="chosen" aria-selected="true"' if chosen else ""
    mark = ' class="brushed"' if brushed and not chosen else mark
    columns = "".join(
        f'<td class="bar" style="--tint:{tint};--part:{_part(cell, most)}%">{cell_html(cell)}</td>'
        for cell, most, tint in zip(cells, largest, (BLUE, ORANGE), strict=True)
    )
    token = "batch:mean" if chosen else f"batch:{sample}"
    hint = "show the batch mean" if chosen else f"show only sample {sample}"
    if i < len(table.batch_index):
        hint += f" (index {table.batch_index[i]} in the batch)"
    name = f"{sample} | {_e(table.labels[i])}" if i < len(table.labels) else str(sample)
    return (
        f'<tr{mark} data-send="{token}" tabindex="0" title="{hint}"><td>{name}</td>{columns}</tr>'
    )


def cell_html(cell: Cell, *, alarm: bool = False) -> str:
    """Return a number as HTML, with different marks for missing and non-finite values.

    If `alarm` is set, the value is a count of non-finite values, and every value except 0 is
    marked.
    """
    if not cell.recorded:
        return f'<span class="missing" title="not recorded at this step">{MISSING}</span>'
    if cell.broken or (alarm and cell.value != 0):
        return f'<span class="broken" title="not finite">{number(cell.value)}</span>'
    return number(cell.value)


def _change(cell: Cell) -> str:
    return signed(cell.change, digits=2) if math.isfinite(cell.change) else ""


def _part(cell: Cell, largest: float) -> float:
    known = math.isfinite(cell.value) and largest > 0
    return round(100 * abs(cell.value) / largest, 1) if known else 0.0
