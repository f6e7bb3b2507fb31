"""Data colours: scales for nodes, values and distributions."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE = (
    "#2c2a6b", "#2f4b94", "#2a6fa6", "#2a90a9", "#3fae9d", "#72c886", "#b3db72", "#f2e66b",
)  # fmt: skip
"""Colours from low to high: dark blue, teal, yellow. Readable in light and dark themes."""

_LESS = ("#e8ebf2", "#a9c3ea", "#5f97d8", "#2463ad")
_MORE = ("#e8ebf2", "#f6bd9a", "#e8824f", "#b9461f")

BLUE, ORANGE, GREY, RED = "#3f6fd8", "#d9692e", "#8a93a6", "#d6334a"
"""Colours for the forward pass, the gradient, the context and errors."""

_SHADES = 1024
"""Number of steps of a colour scale; neighbours cannot be told apart."""

KINDS = {
    "input": "#2f9e63",
    "parameter": "#c08a10",
    "buffer": "#8d7b66",
    "computed": "#5a6fd8",
    "target": "#12958f",
    "loss": "#c8377f",
}
"""Colours of the kinds of nodes, as in `graph.css` for light pages."""

INK = "#737d91"
"""The colour of text in figures that cannot adapt to the theme; readable in both."""

AMBER = "#d99a1f"
"""The colour of warnings."""

LINES = (BLUE, ORANGE, "#2a9d7f", "#a25bc7", "#b58a1c", "#4aa3c7", "#c2497f", "#6f7d95")
"""Line colours of a chart, in order."""


def colour_at(place: float) -> str:
    """Return the colour of `SCALE` at `place` in 0 .. 1."""
    return _between(SCALE, place)


def colours_at(places: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Return the colours of `SCALE` at places in 0 .. 1, [..., 3]; grey for NaN."""
    known = np.nan_to_num(np.clip(places, 0.0, 1.0))
    found: NDArray[np.uint8] = _table()[np.rint(known * _SHADES).astype(np.int64)]
    found[np.isnan(places)] = 128
    return found


@cache
def _table() -> NDArray[np.uint8]:
    """Return the colours of all places of `SCALE`, [places, 3]."""
    colours = [_channels(_shade(SCALE, i)) for i in range(_SHADES + 1)]
    return np.array(colours, np.uint8)


def signed_colour(place: float) -> str:
    """Return blue for -1, grey for 0 and orange for 1, interpolated in between."""
    return _between(_LESS if place < 0 else _MORE, abs(place))


def faded(colour: str, shades: int = 64) -> list[str]:
    """Return `colour` from transparent to opaque, for images on any background."""
    return [f"{colour}{round(255 * i / (shades - 1)):02x}" for i in range(shades)]


def signed_faded(shades: int = 64) -> list[str]:
    """Return colours from blue through transparent to orange, for signed values."""
    return faded("#2463ad", shades)[::-1] + faded("#d1561f", shades)


def _between(colours: tuple[str, ...], place: float) -> str:
    """Return the colour at `place` in 0 .. 1 of equally spaced `colours`."""
    return _shade(colours, round(min(max(place, 0.0), 1.0) * _SHADES))


@cache  # at most `_SHADES` entries for each scale; a graph has a thousand boxes
def _shade(colours: tuple[str, ...], number: int) -> str:
    exact = number / _SHADES * (len(colours) - 1)
    left = min(bisect_right(range(len(colours)), exact) - 1, len(colours) - 2)
    a, b = (_channels(c) for c in colours[left : left + 2])
    mixed = (round(x + (y - x) * (exact - left)) for x, y in zip(a, b, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
