"""Numbers as images: grey or in colours, as the source of an `img`."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

_ENDS = {-1: np.array([0x24, 0x63, 0xAD]), 1: np.array([0xD1, 0x56, 0x1F])}
_VEILED = 0.8
"""How far the largest value covers the image below."""


def flat(value: NDArray[Any]) -> NDArray[np.float64]:
    """Return a value of one sample as rows and columns; channels are added up."""
    value = np.asarray(value, np.float64)
    while value.ndim > 2:
        value = value.sum(0)
    return value if value.ndim == 2 else value.reshape(1, -1)


def largest_magnitude(values: NDArray[Any]) -> float:
    """Return the largest magnitude of finite values; 0 if there are none."""
    sizes = np.abs(values)
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def signed(place: NDArray[np.float64]) -> Image:
    """Return colours from blue for -1 through white to orange for 1; grey where missing."""
    white = np.full(3, 255.0)
    share = np.clip(np.abs(place), 0, 1)[..., None]
    end = np.where((place < 0)[..., None], _ENDS[-1], _ENDS[1])
    colours = white + share * (end - white)
    colours[np.isnan(place)] = 128
    image: Image = (np.nan_to_num(colours) + 0.5).astype(np.uint8)
    return image


def veil(place: NDArray[np.float64]) -> Image:
    """Return the colours of `signed` as a veil, [height, width, 4]: 0 is transparent."""
    share = np.clip(np.abs(place), 0, 1)
    ends = np.where((place < 0)[..., None], _ENDS[-1], _ENDS[1])
    colours = np.concatenate([ends, _VEILED * 255 * np.nan_to_num(share)[..., None]], -1)
    image: Image = (colours + 0.5).astype(np.uint8)
    return image


def png(image: Image) -> str:
    """Return an image [height, width, 3 or 4] as a data URL."""
    height, width, channels = image.shape
    lines = np.zeros((height, 1 + channels * width), np.uint8)  # each begins with its filter, 0
    lines[:, 1:] = image.reshape(height, -1)
    kind = 6 if channels == 4 else 2
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 6)),
        (b"IEND", b""),
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return "data:image/png;base64," + b64encode(content).decode()


def stretched(value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values as shares of their range; 0.5 where all are the same."""
    finite = value[np.isfinite(value)]
    if not finite.size or finite.max() == finite.min():
        return np.full(value.shape, 0.5)
    stretched: NDArray[np.float64] = (value - finite.min()) / (finite.max() - finite.min())
    return stretched


def as_bytes(colours: NDArray[np.float64]) -> Image:
    """Return colours from 0 to 1 as bytes; black where they are NaN."""
    return (np.clip(np.nan_to_num(colours), 0, 1) * 255 + 0.5).astype(np.uint8)
