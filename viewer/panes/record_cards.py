"""Cards with pictures that are computed from the records, and what would fill an empty card."""

from __future__ import annotations

from collections.abc import Callable

from comgra_decl.query import Picture
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.numbers import MISSING, count, number
from comgra_decl.viewer.model.record_pictures import Computed
from comgra_decl.viewer.palette import colour_at

_SIZE, _MARGIN = 190, 8
_BETWEEN, _LETTER, _NAMED = 26, 6, 24
"""Pixels between layers and for a letter, and the most letters of a name below a line."""


_TITLES = {
    "likeness": "similarity of layers (CKA, unbiased)",
    "confusion": "confusion matrix",
    "reliability": "reliability",
    "linear_probe": "linear probe of each layer",
}


def record_card(found: Computed) -> str:
    """Return a card with a picture, or with the reason why it is empty and what fills it."""
    if found.picture is None:
        return missing_card(_TITLES[found.name], found.why, found.lines)
    return _DRAWN[found.name](found.picture)


def missing_card(title: str, why: str, lines: str = "") -> str:
    """Return an empty card: why it is empty, and lines of the spec that would fill it."""
    fill = f"<p>These lines of the spec fill it:</p><pre>{_e(lines)}</pre>" if lines else ""
    return f'<div class="card"><h3>{_e(title)}</h3><p>{_e(why)}</p>{fill}</div>'


def _likeness(found: Picture) -> str:
    return (
        f'<div class="card"><h3>{_TITLES["likeness"]}</h3>'
        f"{_heat(found, found.labels['node'], 1.0, linked=True)}</div>"
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
    dark = "#fff" if share < 0.6 else "#111"
    return f'<td style="background:{colour_at(share)};color:{dark}">{value:.2g}</td>'


def _confusion(found: Picture) -> str:
    counts = found.values[0]
    whole = Picture("confusion", counts, ("class", "predicted class"))
    names = [str(i) for i in range(len(counts))]
    return (
        '<div class="card"><h3>confusion matrix (rows: class, columns: predicted class)</h3>'
        f"{_heat(whole, names, float(counts.max(initial=0)))}</div>"
    )


def _reliability(found: Picture) -> str:
    """Return a card with the accuracy in each bin of the confidence."""
    width = _SIZE / len(found.values)
    bars = []
    for i, (sure, right, samples) in enumerate(found.values.tolist()):
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
    total = count(int(found.values[:, 2].sum()))
    return (
        f'<div class="card"><h3>reliability: {_e(found.node or "")}</h3>'
        f'<svg class="curve bars" width="{_SIZE}" height="{_SIZE}" role="img" '
        f'aria-label="Accuracy by confidence">{"".join(bars)}'
        f'<line x1="0" y1="{_SIZE}" x2="{_SIZE}" y2="0"/></svg>'
        f"<p>accuracy (up) by confidence (0 to 1, across) of {total} samples; the bars of a "
        "calibrated model end at the diagonal</p></div>"
    )


def _decoded(found: Picture) -> str:
    """Return a card with a line over the layers."""
    names, values = found.labels["node"], found.values[-1].tolist()
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
    tested = found.facts["tested"][-1]
    return (
        '<div class="card"><h3>linear probe of each layer</h3><div class="wide">'
        f'<svg class="curve layers" width="{places[-1] + 3 * _MARGIN}" height="{height}" '
        f'role="img" aria-label="Accuracy of a linear probe by layer"><path d="{"".join(pieces)}"/>'
        f"{scale}{''.join(marks)}{texts}</svg></div>"
        f"<p>accuracy of a linear classifier of each layer's values, on {count(tested)} samples to "
        f"which it was not fitted, at step {count(found.step or 0)}</p></div>"
    )


def _short(name: str) -> str:
    """Return the end of a long name, which tells layers apart."""
    return name if len(name) <= _NAMED else "\u2026" + name[1 - _NAMED :]


_DRAWN: dict[str, Callable[[Picture], str]] = {
    "likeness": _likeness,
    "confusion": _confusion,
    "reliability": _reliability,
    "linear_probe": _decoded,
}
