"""The card with the cloud of the selected node."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.clouds import METHOD_NAMES, Cloud, NoCloud, layouts_here
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.palette import LINES
from comgra_decl.viewer.panes.record_cards import missing_card

FIT_AGAIN = "fit again"
"""What the button sends that fits the axes and the frame to all records."""

_BRUSHED = ' class="brushed"'

_SIZE, _MARGIN = 190, 8
_WIDER, _SPRITE = 300, 24
"""Pixels of a cloud of images, and of an image in it."""


LASSO = "lasso"
"""What a line around points sends, followed by the numbers of their samples."""


def cloud_card(
    found: Cloud | NoCloud,
    node: str,
    sample: int,
    sprites: Sequence[str] = (),
    brushed: Collection[int] = (),
) -> str:
    """Return a card with a dot or an image for each sample, or with why there are none.

    Args:
        found: the cloud.
        node: the selected node.
        sample: the selected sample.
        sprites: the images of the samples; "" for a dot.
        brushed: the brushed samples, which stand out.
    """
    title, chooser = f"cloud: {node}", "".join(_choice(m, found.method) for m in layouts_here())
    if isinstance(found, NoCloud):
        again = _fit_button("lay out again") if found.again else ""
        return missing_card(title, found.why, found.lines, more=again + chooser)
    size = _WIDER if any(sprites) else _SIZE
    return (
        f'<div class="card"><h3>{_e(title)}</h3>'
        f'<svg class="points{" some" * bool(brushed)}" data-lasso="{LASSO}" width="{size}" '
        f'height="{size}" role="img" aria-label="Cloud of {_e(node)}">'
        f"{_dots(found, sample, size, sprites, brushed)}</svg>"
        f"<p>{_e(found.note)}, fitted to {count(found.steps)} steps{_beyond(found)}</p>"
        f'<p class="soft">Draw a line around points to brush their samples.</p>'
        f"{chooser}</div>"
    )


def _dots(
    found: Cloud, sample: int, size: int, sprites: Sequence[str], brushed: Collection[int]
) -> str:
    groups = sorted(set(found.labels))
    low, high = np.array(found.low), np.array(found.high)
    span = np.where(high > low, high - low, 1.0)
    margin = _SPRITE // 2 + 2 if any(sprites) else _MARGIN
    places = margin + (found.points - low) / span * (size - 2 * margin)
    dots = []
    for i, (x, y) in enumerate(np.clip(np.nan_to_num(places), 0, size).tolist()):
        label = found.labels[i] if i < len(found.labels) else ""
        colour = LINES[groups.index(label) % len(LINES)] if label in groups else LINES[0]
        sprite = sprites[i] if i < len(sprites) else ""
        dots.append(
            f'<g{_BRUSHED * (i in brushed)} tabindex="0" data-mark="{i}" data-send="sample:{i}">'
            f"{_mark(x, size - y, colour, sprite, i == sample)}"
            f"<title>sample {i} {_e(label)}</title></g>"
        )
    if sample < len(dots):  # on top
        dots.append(dots.pop(sample))
    return "".join(dots)


def _mark(x: float, y: float, colour: str, sprite: str, chosen: bool) -> str:
    """Return a dot, or the image of a sample in a frame of the colour of its label."""
    if not sprite:
        ring = ' stroke="currentColor" stroke-width="2"' if chosen else ""
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"{ring}/>'
    left, top = x - _SPRITE / 2, y - _SPRITE / 2
    ring = "currentColor" if chosen else colour
    box = f'x="{left:.1f}" y="{top:.1f}" width="{_SPRITE}" height="{_SPRITE}"'
    return (
        f'<image href="{sprite}" {box} style="image-rendering:pixelated"/>'
        f'<rect {box} fill="none" stroke="{ring}" stroke-width="{3 if chosen else 2}"/>'
    )


def _beyond(found: Cloud) -> str:
    """Return the offer to fit the frame again if points have left it."""
    if not found.outside:
        return ""
    points = "1 point lies" if found.outside == 1 else f"{count(found.outside)} points lie"
    drawn = "is drawn" if found.outside == 1 else "are drawn"
    return f"; {points} outside and {drawn} at the edge " + _fit_button("fit to all steps")


def _fit_button(name: str) -> str:
    return f'<button type="button" aria-pressed="false" data-send="{FIT_AGAIN}">{name}</button> '


def _choice(method: str, chosen: str) -> str:
    """Return a button that lays out the cloud by a method; "" if there is no other method."""
    if len(layouts_here()) < 2:
        return ""
    pressed = str(method == chosen).lower()
    send = f'data-send="cloud:{method}" aria-pressed="{pressed}"'
    return f'<button type="button" {send}>{METHOD_NAMES[method]}</button> '
