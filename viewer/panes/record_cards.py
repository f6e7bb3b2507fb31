"""Cards with pictures that are computed from the records, and what would fill an empty card."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from comgra_decl.query import Picture
from comgra_decl.viewer.escaping import html_prose
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.images import (
    Image,
    as_bytes,
    flat,
    largest_magnitude,
    png,
    signed,
)
from comgra_decl.viewer.model.landscapes import Curve, Floats, Landscape
from comgra_decl.viewer.model.numbers import MISSING, count, number
from comgra_decl.viewer.model.record_pictures import Computed
from comgra_decl.viewer.palette import LINES, SCALE, colour_at, colours_at
from comgra_decl.viewer.panes.landscapes import landscape_card

CSS = """
.card.empty { border-style: dashed; }
.grid { display: block; }
.grid image { image-rendering: pixelated; }
.grid rect { fill: none; stroke: currentColor; stroke-width: 1.2; }
.scale { background: linear-gradient(to right, SHADES); display: inline-block; height: 8px;
  margin: 0 6px; width: 70px; }
.card .maps { display: grid; gap: 4px; grid-template-columns: repeat(4, 64px); }
.card .maps img { height: 64px; object-fit: fill; width: 64px; }
.card .maps.many { grid-template-columns: repeat(8, 44px); }
.card .maps.many img { height: 44px; width: 44px; }
.card .maps .dead { object-position: 100px;
  background: repeating-linear-gradient(45deg, #d6334a 0 2px, transparent 2px 7px);
  object-fit: none; }
.card .twice { display: flex; flex-wrap: wrap; gap: 16px; }
.card .flow td.bar { min-width: 150px; text-align: right; }
.card .flow th { border: 0; font-weight: 450; }
.card .several path { stroke: var(--line-colour); }
.card .several circle { cursor: auto; fill: var(--line-colour); }
.card .heads th::before { background: var(--line-colour); border-radius: 2px; content: "";
  display: inline-block; height: 8px; margin-right: 6px; width: 8px; }
""".replace("SHADES", ", ".join(SCALE))

_SIZE, _WIDE, _MARGIN = 190, 300, 8
_COUNTED = 36  # pixels of the histogram below a reliability diagram
_DARK = 0.345  # place on the scale below which white text has more contrast than black
_DEAD = np.array([0xD6, 0x33, 0x4A], np.uint8)
_ALIVE = np.array([0xC9, 0xD3, 0xE6], np.uint8)
_MOST_TILES = 64
"""Most channels or filters that are drawn."""
_MOST_MAPS = 8
"""Most samples of a batch whose maps are drawn."""
_BETWEEN, _LETTER, _NAMED = 26, 6, 24
"""Pixels between layers and for a letter, and the most letters of a name below a line."""


_TITLES = {
    "likeness": "similarity of layers (CKA, unbiased)",
    "confusion": "confusion matrix",
    "reliability": "reliability",
    "linear_probe": "linear probe of each layer",
    "dead_units": "dead units",
    "likeness_over_steps": "similarity of steps (CKA, unbiased)",
    "flow": "gradient flow",
    "spectrum": "weight spectrum",
    "loss_cam": "Grad-CAM of the loss",
    "feature_maps": "feature maps",
    "filters": "filters",
    "induction": "induction scores of attention heads",
}


def record_card(found: Computed) -> str:
    """Return a card with a picture, or with the reason why it is empty and what fills it."""
    if found.picture is None:
        return missing_card(_title(found), found.why, found.lines)
    return _DRAWN[found.name](found, found.picture)


def _title(found: Computed) -> str:
    return _TITLES[found.name] + (f": {found.node}" if found.node else "")


def missing_card(title: str, why: str, lines: str = "", *, more: str = "") -> str:
    """Return an empty card: why it is empty, lines of the spec that would fill it, and HTML."""
    fill = f"<p>These lines of the spec fill it:</p><pre>{_e(lines)}</pre>" if lines else ""
    return f'<div class="card empty"><h3>{_e(title)}</h3><p>{html_prose(why)}</p>{fill}{more}</div>'


def _likeness(found: Computed, picture: Picture) -> str:
    sizes = sorted({*picture.facts["samples"]})
    samples = count(sizes[0]) if len(sizes) == 1 else f"{count(sizes[0])} to {count(sizes[-1])}"
    return (
        f'<div class="card"><h3>{_title(found)}</h3>'
        f"{_heat(picture, picture.labels['node'], 1.0, linked=True)}<p>{samples} samples</p></div>"
    )


def _heat(picture: Picture, names: list[str], most: float, *, linked: bool = False) -> str:
    lines = []
    for name, row in zip(names, picture.values.tolist(), strict=True):
        cells = "".join(_cell(value, most) for value in row)
        send = f' tabindex="0" data-send="node:{_raw(name)}"' if linked else ""
        lines.append(f"<tr><th{send}>{_e(name)}</th>{cells}</tr>")
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: float, most: float) -> str:
    if value != value:  # NaN
        return f'<td title="not defined">{MISSING}</td>'
    share = min(max(value / most, 0.0), 1.0) if most else 0.0
    text = "#fff" if share < _DARK else "#000"
    return f'<td style="background:{colour_at(share)};color:{text}">{value:.2g}</td>'


def _confusion(found: Computed, picture: Picture) -> str:
    counts = picture.values[0]
    whole = Picture("confusion", counts, ("class", "predicted class"))
    names = [str(i) for i in range(len(counts))]
    return (
        f'<div class="card"><h3>{_title(found)} (rows: class, columns: predicted class)</h3>'
        f"{_heat(whole, names, float(counts.max(initial=0)))}</div>"
    )


def _reliability(found: Computed, picture: Picture) -> str:
    """Return a card with the accuracy in each bin of the confidence, above a histogram of it."""
    width = _SIZE / len(picture.values)
    bars, heights = [], []
    most = picture.values[:, 2].max(initial=1)
    for i, (sure, right, samples) in enumerate(picture.values.tolist()):
        if not samples:
            continue
        known = (
            f"confidence {number(sure, digits=3)}, accuracy {number(right, digits=3)}, "
            f"{count(int(samples))} samples"
        )
        bars.append(
            f'<rect x="{i * width + 0.5:.1f}" y="{_SIZE * (1 - right):.1f}" '
            f'width="{width - 1:.1f}" height="{_SIZE * right:.1f}"><title>{known}</title></rect>'
        )
        high = _COUNTED * samples / most
        heights.append(
            f'<rect x="{i * width + 0.5:.1f}" y="{_COUNTED - high:.1f}" '
            f'width="{width - 1:.1f}" height="{high:.1f}"><title>{known}</title></rect>'
        )
    total = count(int(picture.values[:, 2].sum()))
    return (
        f'<div class="card"><h3>{_title(found)}: {_e(picture.node or "")}</h3>'
        f'<svg class="curve bars" width="{_SIZE}" height="{_SIZE}" role="img" '
        f'aria-label="Accuracy by confidence">{"".join(bars)}'
        f'<line x1="0" y1="{_SIZE}" x2="{_SIZE}" y2="0"/></svg>'
        f'<svg class="curve counts" width="{_SIZE}" height="{_COUNTED}" role="img" '
        f'aria-label="Samples by confidence">{"".join(heights)}</svg>'
        f"<p>accuracy (up) by confidence (0 to 1, across) of {total} samples; the bars of a "
        "calibrated model end at the diagonal; below, the samples of each bin</p></div>"
    )


def _decoded(found: Computed, picture: Picture) -> str:
    """Return a card with a line over the layers."""
    names, values = picture.labels["node"], picture.values[-1].tolist()
    places = [_MARGIN + i * _BETWEEN for i in range(len(names))]
    inner, pieces, marks, pen = _SIZE - 2 * _MARGIN, [], [], "M"
    for x, name, value in zip(places, names, values, strict=True):
        if value != value:  # NaN
            pen = "M"
            continue
        y = _MARGIN + inner * (1 - value)
        pieces.append(f"{pen}{x} {y:.1f}")
        pen = "L"
        known = f"{_e(name)}: {number(value, digits=3)}"
        marks.append(
            f'<circle cx="{x}" cy="{y:.1f}" r="4" tabindex="0" data-send="node:{_raw(name)}">'
            f"<title>{known}</title></circle>"
        )
    longest = max(map(len, names))
    height = _SIZE + _LETTER * min(longest, _NAMED)
    texts = "".join(
        f'<text transform="translate({x + 3} {_SIZE + 4}) rotate(90)">{_e(_short(name))}</text>'
        for x, name in zip(places, names, strict=True)
    )
    scale = "".join(
        f'<line x1="0" x2="{places[-1] + _MARGIN}" y1="{y}" y2="{y}"/>'
        f'<text x="{places[-1] + _MARGIN + 3}" y="{y + 4}">{mark}</text>'
        for mark, y in ((1, _MARGIN), (0, _MARGIN + inner))
    )
    tested = picture.facts["tested"][-1]
    return (
        f'<div class="card"><h3>{_title(found)}</h3><div class="wide">'
        f'<svg class="curve layers" width="{places[-1] + 3 * _MARGIN}" height="{height}" '
        f'role="img" aria-label="Accuracy of a linear probe by layer"><path d="{"".join(pieces)}"/>'
        f"{scale}{''.join(marks)}{texts}</svg></div>"
        f"<p>accuracy of a linear classifier of each layer's values, on {count(tested)} samples to "
        f"which it was not fitted, at step {count(picture.step or 0)}</p></div>"
    )


def _short(name: str) -> str:
    """Return the end of a long name, which tells layers apart."""
    return name if len(name) <= _NAMED else "\u2026" + name[1 - _NAMED :]


# -- over steps, and of training ---------------------------------------------------------------


def _dead(found: Computed, picture: Picture) -> str:
    steps, dead = picture.labels["step"], picture.values.astype(bool)
    now = int(dead[:, _place(steps, found.step)].sum())
    drawn = _grid(np.where(dead[..., None], _DEAD, _ALIVE), steps, found.step, rows=None)
    return (
        f'<div class="card"><h3>{_e(_title(found))}</h3>{drawn}'
        f"<p>{count(now)} of {count(len(dead))} units are at or below 0 for all samples at the "
        f"marked step; rows: units, columns: {_range(steps)}</p></div>"
    )


def _alike(found: Computed, picture: Picture) -> str:
    steps = picture.labels["step"]
    drawn = _grid(colours_at(picture.values), steps, found.step, rows=steps)
    return (
        f'<div class="card"><h3>{_e(_title(found))}</h3>{drawn}'
        f'<p>0<span class="scale"></span>1; rows and columns: {_range(steps)}</p></div>'
    )


def _grid(colours: Image, steps: list[int], step: int, *, rows: list[int] | None) -> str:
    """Return an image of cells with a column for each step; the selected step is marked."""
    here, width = _place(steps, step), _SIZE / len(steps)
    marks = f'<rect x="{here * width:.2f}" y="0" width="{width:.2f}" height="{_SIZE}"/>'
    if rows is not None:
        marks += f'<rect x="0" y="{here * width:.2f}" width="{_SIZE}" height="{width:.2f}"/>'
    return (
        f'<svg class="grid" width="{_SIZE}" height="{_SIZE}" role="img" aria-label="Cells by step">'
        f'<image href="{png(colours)}" width="{_SIZE}" height="{_SIZE}" '
        f'preserveAspectRatio="none"/>{marks}</svg>'
    )


def _place(steps: list[int], step: int) -> int:
    return steps.index(step) if step in steps else len(steps) - 1


def _range(steps: list[int]) -> str:
    ends = f"{count(steps[0])} to {count(steps[-1])}" if len(steps) > 1 else count(steps[0])
    return f"{count(len(steps))} records of the probe, steps {ends}"


def _flow(found: Computed, picture: Picture) -> str:
    names, values = picture.labels["node"], picture.values.tolist()
    known = [value for value in values if 0 < value < math.inf]
    low = math.log10(min(known, default=1.0)) - 0.5
    high = max(math.log10(max(known, default=1.0)), low + 1)
    rows = []
    for name, node, value in zip(names, picture.facts["nodes"], values, strict=True):
        share = (math.log10(value) - low) / (high - low) if 0 < value < math.inf else 0.0
        rows.append(
            f'<tr><th tabindex="0" data-send="node:{_raw(node)}">{_e(_short(name))}</th>'
            f'<td class="bar" style="--part:{100 * min(share, 1):.1f}%;--tint:#d9692e">'
            f"{number(value, digits=3)}</td></tr>"
        )
    table = f'<table class="flow"><tbody>{"".join(rows)}</tbody></table>'
    return (
        f'<div class="card"><h3>{_TITLES["flow"]}</h3><div class="wide">{table}</div>'
        "<p>norm of the gradient of each output and parameter, in the order of the calls, at step "
        f"{count(found.step)} of training; the bars are logarithmic</p></div>"
    )


def _spectrum(found: Computed, picture: Picture) -> str:
    steps, values = picture.labels["step"], picture.values
    row = values[_place(steps, found.step)]
    finite = values[np.isfinite(values)]
    most = float(finite.max()) if finite.size else 1.0
    ranks = Curve("singular values by rank", range(1, len(row) + 1), row.tolist(), 0.0, most)
    curves = [ranks]
    if len(steps) > 1:
        largest, smallest = values[:, 0], values[:, -1]
        for name, line in (("largest by step", largest), ("smallest by step", smallest)):
            ends = float(np.nanmin(line, initial=most)), float(np.nanmax(line, initial=0.0))
            curves.append(Curve(name, steps, line.tolist(), *ends, found.step))
    notes = [f"step {count(found.step)} of training, {count(len(row))} singular values"]
    return landscape_card(Landscape(_title(found), tuple(curves), notes=tuple(notes)))


def _loss_cam(found: Computed, picture: Picture) -> str:
    high = found.high or 1.0
    maps = "".join(
        f'<img src="{png(signed(flat(each) / high))}" alt="sample {i}" title="sample {i}">'
        for i, each in enumerate(picture.values[:_MOST_MAPS])
    )
    return (
        f'<div class="card"><h3>{_e(_title(found))}</h3><div class="maps">{maps}</div>'
        f"<p>{_ramp(high)}</p><p>samples of the batch of step {count(found.step)} of training; "
        "negative values support a small loss</p></div>"
    )


def _features(found: Computed, picture: Picture) -> str:
    channels = picture.values[min(found.sample, len(picture.values) - 1)].astype(np.float64)
    means = channels.reshape(len(channels), -1).mean(1)
    order = np.argsort(-np.nan_to_num(means, nan=-np.inf), kind="stable").tolist()
    dead = np.less_equal(channels, 0).reshape(len(channels), -1).all(1)
    tiles = []
    for i in order[:_MOST_TILES]:
        known = f"channel {i}, mean {number(float(means[i]), digits=3)}"
        name, kind = (f"{known}, dead", ' class="dead"') if dead[i] else (known, "")
        tiles.append(_tile(channels[i] / (found.high or 1.0), name, kind))
    more = f"{count(_MOST_TILES)} of " if len(channels) > _MOST_TILES else ""
    never = _number_of(int(dead.sum()))
    return (
        f'<div class="card"><h3>{_e(_title(found))}</h3><div class="maps many">{"".join(tiles)}'
        f"</div><p>{_ramp(found.high)}</p><p>{more}{count(len(channels))} channels of sample "
        f"{found.sample} at step {count(found.step)}, largest mean first; {never} "
        "at or below 0 everywhere</p></div>"
    )


def _number_of(channels: int) -> str:
    return {0: "none is", 1: "1 is"}.get(channels, f"{count(channels)} are")


def _filters(found: Computed, picture: Picture) -> str:
    both = [(f"step {count(found.step)}", picture)]
    if found.beside is not None and found.beside.step != picture.step:
        both.append((f"step {count(found.beside.step or 0)}", found.beside))
    shape = picture.values.shape
    in_colours = len(shape) == 4 and shape[1] == 3
    drawn = [p.values if in_colours else p.values.sum(1) for _, p in both]
    high = max(map(largest_magnitude, drawn))
    columns = []
    for name, each in both:
        kernels = each.values.astype(np.float64)
        tiles = [
            f'<img src="{png(as_bytes(kernel.transpose(1, 2, 0) / (2 * high or 1.0) + 0.5))}" '
            f'alt="filter {i}" title="filter {i}">'
            if in_colours
            else _tile(flat(kernel) / (high or 1.0), f"filter {i}", "")
            for i, kernel in enumerate(kernels[:_MOST_TILES])
        ]
        columns.append(f'<div><p>{name}</p><div class="maps">{"".join(tiles)}</div></div>')
    sums = "" if in_colours or shape[1] == 1 else "; the input channels are added up"
    more = f"{count(_MOST_TILES)} of " if len(picture.values) > _MOST_TILES else ""
    return (
        f'<div class="card"><h3>{_e(_title(found))}</h3><div class="twice">{"".join(columns)}</div>'
        f"<p>{_ramp(high)}</p><p>{more}{count(len(picture.values))} filters{sums}</p></div>"
    )


def _induction(found: Computed, picture: Picture) -> str:
    """Return a card with a curve for each head, and a table with the scores at the step."""
    steps, high = np.asarray(picture.labels["step"], np.float64), found.high or 1.0
    here = _place(picture.labels["step"], found.step)
    across = _MARGIN + (steps - steps[0]) / max(steps[-1] - steps[0], 1.0) * (_WIDE - 2 * _MARGIN)
    heights = _MARGIN + (1 - picture.values / high) * (_SIZE - 2 * _MARGIN)
    curves, rows = [], []
    heads = zip(picture.labels["head"], picture.facts["nodes"], strict=True)
    for i, (name, node) in enumerate(heads):
        style = f'style="--line-colour:{LINES[i % len(LINES)]}"'
        known = np.isfinite(heights[i])
        spots = [f"{x:.1f} {y:.1f}" for x, y in zip(across[known], heights[i, known], strict=True)]
        value = float(picture.values[i, here])
        dot = ""
        if value == value:  # not NaN
            dot = f'<circle cx="{across[here]:.1f}" cy="{heights[i, here]:.1f}" r="3"/>'
        curves.append(f'<g {style}><path d="M{"L".join(spots)}"/>{dot}</g>')
        rows.append(
            f'<tr {style}><th tabindex="0" data-send="node:{_raw(node)}">{_e(name)}</th>'
            f"<td>{number(value, digits=3) if value == value else MISSING}</td></tr>"
        )
    marked = f'x1="{across[here]:.1f}" x2="{across[here]:.1f}" y1="{_MARGIN}" y2="{_SIZE}"'
    ends = f"{count(int(steps[0]))} to {count(int(steps[-1]))}"
    return (
        f'<div class="card"><h3>{_title(found)}</h3><svg class="curve several" width="{_WIDE}" '
        f'height="{_SIZE}" role="img" aria-label="Induction scores by step"><line {marked}/>'
        f"{''.join(curves)}</svg><p>from 0 to {number(high, digits=3)}, steps {ends}</p>"
        f'<table class="heads"><tbody>{"".join(rows)}</tbody></table>'
        f"<p>{count(len(rows))} of {count(picture.facts['heads'])} heads, with the highest scores; "
        f"numbers: step {count(int(steps[here]))}. How much attention a query pays to what "
        "followed the same token before: 1 if all of it</p></div>"
    )


def _tile(place: Floats, name: str, kind: str) -> str:
    return f'<img{kind} src="{png(signed(flat(place)))}" alt="{name}" title="{name}">'


def _ramp(high: float) -> str:
    return f'{number(-high, digits=3)}<span class="ramp"></span>{number(high, digits=3)}'


_DRAWN: dict[str, Callable[[Computed, Picture], str]] = {
    "likeness": _likeness,
    "confusion": _confusion,
    "reliability": _reliability,
    "linear_probe": _decoded,
    "dead_units": _dead,
    "likeness_over_steps": _alike,
    "flow": _flow,
    "spectrum": _spectrum,
    "loss_cam": _loss_cam,
    "feature_maps": _features,
    "filters": _filters,
    "induction": _induction,
}
