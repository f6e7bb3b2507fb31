"""HTML of the effects of interventions: tables, circuits, and the samples of one place."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.circuits import STRONGEST, Drawing
from comgra_decl.viewer.model.effects import ALL_SAMPLES, EffectTable, PlaceEffects
from comgra_decl.viewer.model.images import png, signed
from comgra_decl.viewer.model.numbers import MISSING, count, number

CSS = """
.card td[data-send] { cursor: pointer; }
.card td[aria-selected="true"] { outline: 2px solid currentColor; outline-offset: -2px; }
.card td[data-send]:focus-visible { outline: 2px solid #3f6fd8; outline-offset: -2px; }
.circuit rect { fill: var(--surface); stroke: var(--line); }
.circuit text { fill: currentColor; font-size: 12px; }
.circuit g[data-send] { cursor: pointer; }
.card p.long { max-width: 560px; }
.card .drawn { max-height: 660px; max-width: 760px; overflow: auto; }
.drawn image { cursor: pointer; image-rendering: pixelated; }
.drawn image:focus-visible { outline: 2px solid #3f6fd8; outline-offset: 1px; }
.drawn text { fill: currentColor; font-size: 11px; }
.drawn rect { fill: none; pointer-events: none; stroke: currentColor; }
.drawn rect.chosen { stroke: #3f6fd8; stroke-width: 2; }
.card output { display: block; font-variant-numeric: tabular-nums; min-height: 1.5em; }
.card p.record { max-width: 760px; }
.card p.record code { overflow-wrap: anywhere; user-select: all; }
.circuit path { fill: none; }
.circuit path.within { stroke: var(--line); stroke-dasharray: 3 3; }
.amounts button { background: none; border: 1px solid var(--line); border-radius: 6px;
  color: inherit; cursor: pointer; font: inherit; padding: 1px 8px; }
.amounts button[aria-pressed="true"] { border-color: #3f6fd8; }
"""

_LOW, _HIGH = "#2463ad", "#d1561f"
_DARK = 85  # percent of the blue above which white text has more contrast than black


_MOST_OF_TABLE = 1024
"""Most cells of a table with its numbers; larger ones are drawn."""

_TALL, _BROAD, _LETTER, _LINE = 576, 560, 6.2, 12
"""Pixels for the cells of a drawing, for a letter, and between labels."""


def cell_token(name: str, row: int, column: int) -> str:
    """Return the message of a cell in a table."""
    return f"{_grid(name)}:{row}:{column}"


def _grid(name: str) -> str:
    return f"place:{name}"


def cell_of(token: str) -> tuple[str, int, int]:
    """Return the intervention, the row and the column of a cell's message."""
    where, row, column = token.rsplit(":", 2)
    return where.removeprefix("place:"), int(row), int(column)


def tokens() -> list[str]:
    """Return the messages that circuits may send, except those for nodes."""
    return [f"strongest:{amount}" for amount in STRONGEST]


def grids(tables: Sequence[EffectTable]) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each table whose cells send messages."""
    return {_grid(t.name): (len(t.rows), len(t.columns)) for t in tables if t.values is not None}


def effects_card(table: EffectTable, chosen: str) -> str:
    """Return a table of effects; a cell opens its place, and a row selects its node.

    A table with many cells is a drawing, without its numbers and without rows to click.

    Args:
        table: the table.
        chosen: the message of the cell whose place is open; "" if none is.
    """
    if table.values is None:
        return f'<div class="card"><h3>{_e(table.title)}</h3><p>{_e(table.missing)}</p></div>'
    ends = (number(end * table.most, digits=3) for end in (-1, 1))
    ramp = '<span class="ramp"></span>'.join(ends)
    drawn = table.values.size > _MOST_OF_TABLE
    cells = _drawing(table, chosen) if drawn else _cells(table, chosen)
    return (
        f'<div class="card"><h3>{_e(table.title)}</h3>{cells}<p>{ramp}</p>'
        f"<p>{_e(table.note)}</p></div>"
    )


def _cells(table: EffectTable, chosen: str) -> str:
    """Return the effects as a table of numbers."""
    assert table.values is not None
    lines = []
    rows = zip(table.rows, table.nodes, table.values.tolist(), strict=True)
    for i, (name, node, row) in enumerate(rows):
        cells = []
        for j, value in enumerate(row):
            token = cell_token(table.name, i, j)
            place = f"{name}, {table.columns[j]}"
            cells.append(_cell(value, table.most, token, place, first=not i + j, chosen=chosen))
        send = f' tabindex="0" data-send="node:{_raw(node)}"' if node else ""
        lines.append(f"<tr><th{send}>{_e(name)}</th>{''.join(cells)}</tr>")
    heads = "".join(f"<th>{_e(column)}</th>" for column in table.columns)
    return (
        f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>'
        f"{''.join(lines)}</tbody></table></div>"
    )


def _drawing(table: EffectTable, chosen: str) -> str:
    """Return the effects as a picture, of which each pixel is a cell.

    The names and values of the cells go along as text, so that the page can say what the pointer
    or the arrow keys are at.
    """
    values = table.values
    assert values is not None
    rows, columns = values.shape
    across = float(max(3, min(18, _BROAD // columns)))
    down = float(max(3, min(14, _TALL // rows)))
    width, height = columns * across, rows * down
    left = _LETTER * max(map(len, _named(table)), default=0) + 8
    top = _LETTER * max(map(len, table.columns)) + 8
    shares = values / table.most if table.most else 0 * values
    texts = [
        f'<text x="{left - 4:.1f}" y="{top + (i + 0.5) * down + 4:.1f}" text-anchor="end">'
        f"{_e(name)}</text>"
        for i, name in _spaced(_named(table), down)
    ]
    texts += [
        f'<text transform="translate({left + (j + 0.5) * across + 4:.1f} {top - 4:.1f}) '
        f'rotate(-90)">{_e(name)}</text>'
        for j, name in _spaced(table.columns, across)
    ]
    where = cell_of(chosen) if chosen else None
    if where is not None and where[0] == table.name:
        _, row, column = where
        texts.append(
            f'<rect class="chosen" x="{left + column * across:.1f}" y="{top + row * down:.1f}" '
            f'width="{across:.1f}" height="{down:.1f}"/>'
        )
    content = b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()
    names = (_raw(json.dumps(each)) for each in (table.rows, table.columns))
    return (
        f'<div class="drawn"><svg width="{left + width + 8:.0f}" height="{top + height + 2:.0f}" '
        f'viewBox="0 0 {left + width + 8:.0f} {top + height + 2:.0f}">'
        f'<image href="{png(signed(shares))}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" preserveAspectRatio="none" tabindex="0" role="img" '
        f'aria-label="{_e(table.title)}, {rows} by {columns} places; the arrow keys move" '
        f'data-cells="{_raw(_grid(table.name))}" data-rows="{next(names)}" '
        f'data-columns="{next(names)}" data-values="{content}"/>{"".join(texts)}'
        '<rect class="here"/></svg></div><output aria-live="polite"></output>'
    )


def _named(table: EffectTable) -> list[str]:
    """Return a name for each row: that of the module at its first row, if there are modules."""
    if len(table.rows) * _LINE <= _TALL or not any(table.nodes):
        return [*table.rows]
    before = ("", *table.nodes[:-1])
    return [node if node != last else "" for node, last in zip(table.nodes, before, strict=True)]


def _spaced(names: Sequence[str], pitch: float) -> list[tuple[int, str]]:
    """Return the names, with their numbers, that have room for a line."""
    found: list[tuple[int, str]] = []
    for i, name in enumerate(names):
        if name and (not found or (i - found[-1][0]) * pitch >= _LINE):
            found.append((i, name))
    return found


def _cell(value: float, most: float, token: str, place: str, *, first: bool, chosen: str) -> str:
    """Return a cell that opens its place."""
    if value != value:  # NaN
        return f"<td>{MISSING}</td>"
    style = shaded(value / most if most else 0.0)
    selected = ' aria-selected="true"' if token == chosen else ""
    stop = 0 if first else -1  # arrow keys reach the others
    return (
        f'<td style="{style}" tabindex="{stop}" title="{_e(place)}"'
        f'{selected} data-send="{_raw(token)}">{value:.2g}</td>'
    )


def shaded(share: float) -> str:
    """Return the style from blue for -1 through white to orange for 1."""
    amount = round(100 * min(abs(share), 1.0))
    end = _LOW if share < 0 else _HIGH
    text = "#fff" if share < 0 and amount > _DARK else "#000"
    return f"background:color-mix(in srgb, {end} {amount}%, #fff);color:{text}"


def place_card(found: PlaceEffects, token: str) -> str:
    """Return each sample's measure without and with the change, and the mean over steps.

    Args:
        found: the effects.
        token: of the cell that opened it. The page scrolls to a card with another token.
    """
    lines = []
    for i, (label, without, effect) in enumerate(
        zip(found.labels, found.without.tolist(), found.effects.tolist(), strict=True)
    ):
        numbers = "".join(
            f"<td>{MISSING if value != value else number(value, digits=4)}</td>"
            for value in (without, without + effect, effect)
        )
        whose = label if label == ALL_SAMPLES else f"{i} {label}"
        lines.append(f"<tr><th>{_e(whose)}</th>{numbers}</tr>")
    return (
        f'<div class="card" aria-live="polite" data-opened="{_raw(token)}">'
        f"<h3>{_e(found.title)}</h3>"
        f'<div class="wide"><table><thead><tr><th>sample</th><th>without</th><th>with</th>'
        f"<th>effect</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"<p>{_e(found.measure)} at step {count(found.step)}, without and with the change</p>"
        f"{_course(found)}{_recording(found)}</div>"
    )


def _recording(found: PlaceEffects) -> str:
    """Return how to record all tensors with the change; "" if they are recorded."""
    if not found.entry:
        return ""
    override = shlex.quote(f"interventions.here={found.entry}")
    return (
        '<p class="record">A sweep stores only effects. To record all tensors with this change:'
        f"<br><code>comgra-decl look --step {found.step} RUN {_e(override)} train.py</code></p>"
    )


def _course(found: PlaceEffects) -> str:
    """Return a line of the mean effect over steps, in a band; "" if there is only one step."""
    steps, means = found.steps.astype(np.float64), found.means
    known = np.isfinite(means)
    if known.sum() < 2:
        return ""
    width, height, margin = 240.0, 56.0, 4.0
    errors = np.nan_to_num(found.errors[known])
    lower, upper = means[known] - errors, means[known] + errors
    low, high = min(0.0, float(lower.min())), max(0.0, float(upper.max()))
    span = high - low or 1.0
    across = (steps - steps[0]) / max(steps[-1] - steps[0], 1.0) * (width - 2 * margin) + margin
    places = across[known]

    def drawn(xs: NDArray[np.float64], values: NDArray[np.float64]) -> str:
        ys = margin + (high - values) / span * (height - 2 * margin)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))

    zero = margin + high / span * (height - 2 * margin)
    band = ""
    if errors.any():
        around = drawn(np.append(places, places[::-1]), np.append(upper, lower[::-1]))
        band = f'<polygon points="{around}" fill="{_HIGH}" opacity="0.25"/>'
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" role="img" aria-label="Mean effect over '
        f'steps"><line x1="0" x2="{width:.0f}" y1="{zero:.1f}" y2="{zero:.1f}" '
        f'stroke="currentColor" opacity="0.3"/>{band}<polyline '
        f'points="{drawn(places, means[known])}" fill="none" stroke="{_HIGH}" '
        'stroke-width="1.5"/></svg><p>mean effect'
        f"{' and its standard error' if band else ''}, steps {count(int(steps[0]))} to "
        f"{count(int(steps[-1]))}, from {number(low, digits=3)} to {number(high, digits=3)}</p>"
    )


def circuit_card(drawing: Drawing) -> str:
    """Return the strongest paths as a graph; a click on a place selects its node."""
    circuit, spots = drawing.circuit, drawing.spots
    paths = [
        f'<path class="within" d="{_curve(drawing, *pair)}"><title>{_e(pair[1])} is within '
        f"{_e(pair[0])}</title></path>"
        for pair in circuit.parts
    ]
    for link in reversed(circuit.links):  # the strongest on top
        share = abs(link.effect) / drawing.most if drawing.most else 0.0
        colour = _LOW if link.effect < 0 else _HIGH
        error = "" if link.error != link.error else f" \u00b1 {link.error:.2g}"
        paths.append(
            f'<path d="{_curve(drawing, link.source, link.sink)}" stroke="{colour}" '
            f'stroke-width="{0.6 + 4.4 * share:.2f}" opacity="{0.35 + 0.65 * share:.2f}"><title>'
            f"{_e(link.source)} \u2192 {_e(link.sink)}: {link.effect:.3g}{error}</title></path>"
        )
    boxes = [
        f'<g data-send="node:{_raw(spot.node)}" tabindex="0" role="button" '
        f'aria-label="{_e(spot.name)}">'
        f'<rect x="{spot.x:.1f}" y="{spot.y:.1f}" width="{spot.width:.1f}" '
        f'height="{spot.height:.1f}" rx="4"/>'
        f'<text x="{spot.x + spot.width / 2:.1f}" y="{spot.y + 16:.1f}" text-anchor="middle">'
        f"{_e(spot.name)}</text></g>"
        for spot in spots.values()
    ]
    buttons = "".join(
        f'<button type="button" data-send="strongest:{amount}" '
        f'aria-pressed="{str(amount == drawing.wanted).lower()}">{amount}</button> '
        for amount in STRONGEST
    )
    return (
        f'<div class="card"><h3>{_e(circuit.intervention)}: circuit at step {count(circuit.step)}'
        f'</h3><p class="amounts">strongest paths: {buttons}</p><div class="wide">'
        f'<svg class="circuit" width="{drawing.width:.0f}" height="{drawing.height:.0f}" '
        f'role="group" aria-label="Circuit of {_e(circuit.intervention)}">'
        f"{''.join(paths)}{''.join(boxes)}</svg></div>"
        f'<p class="long">{count(len(circuit.links))} paths; {count(circuit.omitted)} weaker ones '
        f"are not shown; width: mean effect on {_e(circuit.measure)}, at most "
        f"{number(drawing.most, digits=3)}; orange raises it, blue lowers it</p></div>"
    )


def _curve(drawing: Drawing, source: str, sink: str) -> str:
    """Return the path of an edge: straight through the columns that it passes, curved between."""
    a, b = drawing.spots[source], drawing.spots[sink]
    x, y = a.x + a.width, a.y + a.height / 2
    drawn = f"M{x:.1f},{y:.1f}"
    end = b.x, b.x, b.y + b.height / 2
    for left, right, height in [*drawing.lanes.get((source, sink), ()), end]:
        bend = max(30.0, (left - x) / 2)
        drawn += f"C{x + bend:.1f},{y:.1f} {left - bend:.1f},{height:.1f} {left:.1f},{height:.1f}"
        drawn += f"H{right:.1f}" if right > left else ""
        x, y = right, height
    return drawn
