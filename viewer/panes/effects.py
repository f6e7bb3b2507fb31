"""HTML of the effects of interventions: tables, circuits, and the samples of one place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.circuits import STRONGEST, Drawing
from comgra_decl.viewer.model.effects import EffectTable, PlaceEffects
from comgra_decl.viewer.model.numbers import MISSING, count, number

CSS = """
.card td[data-send] { cursor: pointer; }
.card td[aria-selected="true"] { outline: 2px solid currentColor; outline-offset: -2px; }
.card td[data-send]:focus-visible { outline: 2px solid #3f6fd8; outline-offset: -2px; }
.circuit rect { fill: var(--surface); stroke: var(--line); }
.circuit text { fill: currentColor; font-size: 12px; }
.circuit g[data-send] { cursor: pointer; }
.card p.long { max-width: 560px; }
.circuit path { fill: none; }
.circuit path.within { stroke: var(--line); stroke-dasharray: 3 3; }
.amounts button { background: none; border: 1px solid var(--line); border-radius: 6px;
  color: inherit; cursor: pointer; font: inherit; padding: 1px 8px; }
.amounts button[aria-pressed="true"] { border-color: #3f6fd8; }
"""

_LOW, _HIGH = "#2463ad", "#d1561f"


def cell_token(name: str, row: int, column: int) -> str:
    """Return the message of a cell in a table."""
    return f"place:{row}:{column}:{name}"


def tokens(tables: Sequence[EffectTable]) -> list[str]:
    """Return the messages that the tables and circuits may send, except those for nodes."""
    found = [f"strongest:{amount}" for amount in STRONGEST]
    for table in tables:
        if table.values is not None:
            rows, columns = table.values.shape
            cells = [(row, column) for row in range(rows) for column in range(columns)]
            found += [cell_token(table.name, *cell) for cell in cells]
    return found


def effects_card(table: EffectTable, chosen: str) -> str:
    """Return a table of effects; a cell opens its place, and a row selects its node.

    Args:
        table: the table.
        chosen: the message of the cell whose place is open; "" if none is.
    """
    if table.values is None:
        return f'<div class="card"><h3>{_e(table.title)}</h3><p>{_e(table.missing)}</p></div>'
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
    ends = (number(end * table.most, digits=3) for end in (-1, 1))
    ramp = '<span class="ramp"></span>'.join(ends)
    return (
        f'<div class="card"><h3>{_e(table.title)}</h3><div class="wide"><table><thead><tr><th></th>'
        f"{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div><p>{ramp}</p>"
        f"<p>{_e(table.note)}</p></div>"
    )


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
    end, dark = (_LOW, 60) if share < 0 else (_HIGH, 90)
    text = "#fff" if amount > dark else "#111"
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
        lines.append(f"<tr><th>{i} {_e(label)}</th>{numbers}</tr>")
    return (
        f'<div class="card" aria-live="polite" data-opened="{_raw(token)}">'
        f"<h3>{_e(found.title)}</h3>"
        f'<div class="wide"><table><thead><tr><th>sample</th><th>without</th><th>with</th>'
        f"<th>effect</th></tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"<p>{_e(found.measure)} at step {count(found.step)}, without and with the change</p>"
        f"{_course(found)}</div>"
    )


def _course(found: PlaceEffects) -> str:
    """Return a line of the mean effect over steps; "" if there is only one."""
    steps, means = found.steps.astype(np.float64), found.means
    known = np.isfinite(means)
    if known.sum() < 2:
        return ""
    width, height, margin = 240.0, 56.0, 4.0
    low, high = min(0.0, float(means[known].min())), max(0.0, float(means[known].max()))
    span = high - low or 1.0

    def y(value: float) -> float:
        return margin + (high - value) / span * (height - 2 * margin)

    across = (steps - steps[0]) / max(steps[-1] - steps[0], 1.0) * (width - 2 * margin) + margin
    points = " ".join(
        f"{x:.1f},{y(value):.1f}"
        for x, value in zip(across[known].tolist(), means[known].tolist(), strict=True)
    )
    return (
        f'<svg width="{width:.0f}" height="{height:.0f}" role="img" aria-label="Mean effect over '
        f'steps"><line x1="0" x2="{width:.0f}" y1="{y(0.0):.1f}" y2="{y(0.0):.1f}" '
        f'stroke="currentColor" opacity="0.3"/><polyline points="{points}" fill="none" '
        f'stroke="{_HIGH}" stroke-width="1.5"/></svg><p>mean effect, steps '
        f"{count(int(steps[0]))} to {count(int(steps[-1]))}, from {number(low, digits=3)} to "
        f"{number(high, digits=3)}</p>"
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
