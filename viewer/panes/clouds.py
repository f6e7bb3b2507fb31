"""The card with the cloud of the selected node."""

from __future__ import annotations

import numpy as np

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.clouds import Cloud, layouts_here
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.record_pictures import Computed
from comgra_decl.viewer.palette import LINES
from comgra_decl.viewer.panes.record_cards import missing_card

FIT_AGAIN = "fit again"
"""What the button sends that fits the axes and the frame to all records."""

_SIZE, _MARGIN = 190, 8
_NAMES = {"pca": "principal components", "tsne": "t-SNE"}


def cloud_card(found: Cloud | Computed, node: str, sample: int) -> str:
    """Return a card with a dot for each sample, or with the reason why there are none."""
    if isinstance(found, Computed):
        return missing_card(f"cloud: {node}", found.why, found.lines)
    chooser = "".join(_choice(method, found.method) for method in layouts_here())
    return (
        f'<div class="card"><h3>cloud: {_e(node)}</h3>'
        f'<svg width="{_SIZE}" height="{_SIZE}" role="img" aria-label="Cloud of {_e(node)}">'
        f"{_dots(found, sample)}</svg>"
        f"<p>{_e(found.note)}, fitted to {count(found.steps)} steps{_beyond(found)}</p>"
        f"{chooser}</div>"
    )


def _dots(found: Cloud, sample: int) -> str:
    groups = sorted(set(found.labels))
    low, high = np.array(found.low), np.array(found.high)
    span = np.where(high > low, high - low, 1.0)
    places = _MARGIN + (found.points - low) / span * (_SIZE - 2 * _MARGIN)
    dots = []
    for i, (x, y) in enumerate(np.clip(np.nan_to_num(places), 0, _SIZE).tolist()):
        label = found.labels[i] if i < len(found.labels) else ""
        colour = LINES[groups.index(label) % len(LINES)] if label in groups else LINES[0]
        ring = ' stroke="currentColor" stroke-width="2"' if i == sample else ""
        dots.append(
            f'<circle cx="{x:.1f}" cy="{_SIZE - y:.1f}" r="4.5" fill="{colour}"{ring} '
            f'tabindex="0" data-send="sample:{i}"><title>sample {i} {_e(label)}</title></circle>'
        )
    return "".join(dots)


def _beyond(found: Cloud) -> str:
    """Return the offer to fit the frame again if points have left it."""
    if not found.outside:
        return ""
    points = "1 point lies" if found.outside == 1 else f"{count(found.outside)} points lie"
    return (
        f"; {points} outside and {'is' if found.outside == 1 else 'are'} drawn at the edge "
        f'<button type="button" aria-pressed="false" data-send="{FIT_AGAIN}">fit to all steps'
        "</button>"
    )


def _choice(method: str, chosen: str) -> str:
    """Return a button that lays out the cloud by a method; "" if there is no other method."""
    if len(layouts_here()) < 2:
        return ""
    pressed = str(method == chosen).lower()
    send = f'data-send="cloud:{method}" aria-pressed="{pressed}"'
    return f'<button type="button" {send}>{_NAMES[method]}</button> '
