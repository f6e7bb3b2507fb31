"""Cards with the curvature of a loss, and with slices through it."""

from __future__ import annotations

import math

import numpy as np

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.images import png
from comgra_decl.viewer.model.landscapes import Curve, Floats, Landscape
from comgra_decl.viewer.model.numbers import count, number

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 240, 130, 6, 16, 14
_RAMP = '<span class="heights"></span>'
_LOW, _HIGH = np.array([0xF4, 0xF7, 0xFC]), np.array([0x1D, 0x4C, 0x91])


def landscape_card(found: Landscape) -> str:
    """Return a card with the curves or the grid of a picture."""
    drawn = "".join(map(_curve, found.curves))
    if found.grid is not None:
        ends = (number(end, digits=3) for end in (found.low, found.high))
        image = f'<img src="{_heights(found.grid, found.low, found.high)}" alt="{_e(found.title)}">'
        if found.way:
            image = f'<div class="over">{image}{_way(found)}</div>'
        drawn = f"{image}<p>{_RAMP.join(ends)}</p>"
    notes = "".join(f"<p>{_e(note)}</p>" for note in found.notes)
    return f'<div class="card"><h3>{_e(found.title)}</h3>{drawn}{notes}</div>'


def _curve(curve: Curve) -> str:
    x = np.asarray(curve.x, np.float64)
    span = float(x[-1] - x[0]) or 1.0
    height = curve.high - curve.low or 1.0
    inner = _HEIGHT - _BELOW - _ABOVE

    def across(value: float) -> float:
        return _LEFT + (value - float(x[0])) / span * (_WIDTH - 2 * _LEFT)

    pieces, pen = [], "M"
    for place, value in zip(x.tolist(), curve.y, strict=True):
        if math.isfinite(value):
            y = _ABOVE + inner * (1 - (value - curve.low) / height)
            pieces.append(f"{pen}{across(place):.1f} {y:.1f}")
        pen = "L" if math.isfinite(value) else "M"
    line = ""
    if curve.marked is not None:
        x_of = f"{across(curve.marked):.1f}"
        line = f'<line x1="{x_of}" x2="{x_of}" y1="{_ABOVE}" y2="{_ABOVE + inner}"/>'
    bottom = _HEIGHT - 3
    texts = (
        f'<text x="{_LEFT}" y="{bottom}">{_e(number(x[0], digits=3))}</text>'
        f'<text x="{_WIDTH - _LEFT}" y="{bottom}" text-anchor="end">'
        f"{_e(number(x[-1], digits=3))}</text>"
        f'<text x="{_LEFT}" y="10">{_e(number(curve.low, digits=3))} to '
        f"{_e(number(curve.high, digits=3))}</text>"
    )
    return (
        f'<p>{_e(curve.name)}</p><svg class="curve" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{_e(curve.name)}"><path d="{"".join(pieces)}"/>{line}{texts}</svg>'
    )


def _way(found: Landscape) -> str:
    """Return the way of a training as a line over the grid."""
    places = [(f"{100 * column:.2f}", f"{100 * row:.2f}") for _, row, column in found.way]
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="1.6"><title>step {count(step)}</title></circle>'
        for (step, _, _), (x, y) in zip(found.way, places, strict=True)
    )
    line = " ".join(f"{x},{y}" for x, y in places)
    return (
        '<svg class="veil way" viewBox="0 0 100 100" role="img" aria-label="Way of the training '
        f'through {_e(found.title)}"><polyline points="{line}"/>{dots}</svg>'
    )


def _heights(grid: Floats, low: float, high: float) -> str:
    """Return an image of a grid, darker where it is higher; grey where it is not finite."""
    share = np.clip((grid - low) / ((high - low) or 1.0), 0, 1)[..., None]
    colours = _LOW + np.nan_to_num(share) * (_HIGH - _LOW)
    colours[~np.isfinite(grid)] = 128
    return png((colours + 0.5).astype(np.uint8))
