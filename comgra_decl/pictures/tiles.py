"""Values as one picture, for programs that show nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST = 64
"""Largest number of tiles."""

_SIDE = 64
"""Tiles smaller than this are enlarged by a whole factor."""

_NEGATIVE, _POSITIVE = np.array([0x24, 0x63, 0xAD]), np.array([0xD1, 0x56, 0x1F])
_MISSING, _GAP = (255, 128, 128), 255


def tiled(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return maps [..., height, width] side by side as colours [rows, columns, 3].

    Nonnegative values are grey, from black for the smallest to white for the largest. Others are
    blue below zero, white at zero and orange above. NaN and infinite values are pink. The scale is
    the same for all tiles.
    """
    assert values.ndim >= 2
    height, width = values.shape[-2:]
    maps = values.reshape(-1, height, width)[:_MOST].astype(np.float64)
    colours = _colours(maps)
    factor = max(1, _SIDE // max(height, width))
    colours = colours.repeat(factor, 1).repeat(factor, 2)
    across = int(np.ceil(np.sqrt(len(maps))))
    down = -(-len(maps) // across)
    high, wide = colours.shape[1] + 1, colours.shape[2] + 1
    sheet = np.full((down * high - 1, across * wide - 1, 3), _GAP, np.uint8)
    for number, tile in enumerate(colours):
        top, left = number // across * high, number % across * wide
        sheet[top : top + high - 1, left : left + wide - 1] = tile
    return sheet


def _colours(maps: NDArray[np.float64]) -> NDArray[np.uint8]:
    known = np.isfinite(maps)
    finite, maps = maps[known], np.where(known, maps, 0)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if low >= 0:
        share = (maps - low) / (high - low) if high > low else np.full(maps.shape, 0.5)
        colours = np.repeat(share[..., None] * 255, 3, -1)
    else:
        share = np.abs(maps / max(-low, high))[..., None]
        end = np.where((maps < 0)[..., None], _NEGATIVE, _POSITIVE)
        colours = 255 + share * (end - 255.0)
    colours[~known] = _MISSING
    found: NDArray[np.uint8] = (colours + 0.5).astype(np.uint8)
    return found
