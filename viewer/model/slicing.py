"""Maps dims of a tensor to rows and columns of a table. Other dims are fixed at an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS, COLOUR = "y", "x", "c"
AXES = (ROWS, COLUMNS, COLOUR)

_PICTURE = 8  # minimum height and width of an image with three channels

Place = str | int


@dataclass(frozen=True, slots=True)
class Slicing:
    """Placement of each dim: "y" (rows), "x" (columns), "c" (RGB channels) or an index.

    Each axis occurs at most once. Unless there are no dims, at least one axis occurs.
    """

    places: tuple[Place, ...]

    @property
    def text(self) -> str:
        """URL form: "0,y,x"."""
        return ",".join(map(str, self.places))

    def dim(self, axis: str) -> int | None:
        """Return the dim on an axis, or None."""
        return self.places.index(axis) if axis in self.places else None

    def put(self, dim: int, place: Place) -> Slicing:
        """Return the slicing with a dim on an axis. The two dims swap places."""
        places = list(self.places)
        holder = self.dim(place) if isinstance(place, str) else None
        if holder is not None:
            places[holder] = places[dim]
        places[dim] = place
        return Slicing(tuple(places))


def slicing_for(
    text: str, shape: Sequence[int], *, fixed: int | None = None, picture: bool = False
) -> Slicing:
    """Return the slicing described by URL text for a shape; ignores parts that do not fit.

    Args:
        text: See `Slicing.text`; untrusted. If it is malformed or has a different number of dims,
            the last two dims become rows and columns, and the others are fixed at index 0.
        shape: Sizes of the dims.
        fixed: Index of the first dim; overrides the text.
        picture: Whether three channels are shown as colours by default.
    """
    parts = text.split(",") if text else []
    if len(parts) != len(shape):
        return _usual(shape, fixed, picture)
    places: list[Place] = []
    for part, size in zip(parts, shape, strict=True):
        axis = part in AXES and part not in places and (part != COLOUR or size == 3)
        places.append(part if axis else _index(part, size))
    if fixed is not None and places:
        places[0] = fixed
    if ROWS not in places and COLUMNS not in places:
        return _usual(shape, fixed, picture)
    return Slicing(tuple(places))


def taken(values: NDArray[np.generic], slicing: Slicing) -> NDArray[np.generic]:
    """Return the cells [rows, columns], or [rows, columns, 3] if a dim contains colours."""
    kept = [place for place in slicing.places if isinstance(place, str)]
    index = tuple(slice(None) if isinstance(p, str) else p for p in slicing.places)
    part = np.asarray(values[index])
    for axis in (ROWS, COLUMNS):
        if axis not in kept:
            part, kept = part[np.newaxis], [axis, *kept]
    return part.transpose([kept.index(axis) for axis in AXES if axis in kept])


def _usual(shape: Sequence[int], fixed: int | None, picture: bool) -> Slicing:
    places: list[Place] = [0] * len(shape)
    first = 0
    if fixed is not None and places:
        places[0], first = fixed, 1
    free = list(range(first, len(shape)))
    channels = _channels(shape, free[-3:]) if picture else None
    if channels is not None:
        free.remove(channels)
        places[channels] = COLOUR
    for axis, dim in zip((COLUMNS, ROWS) if len(free) > 1 else (ROWS,), free[::-1], strict=False):
        places[dim] = axis
    return Slicing(tuple(places))


def _channels(shape: Sequence[int], dims: list[int]) -> int | None:
    """Return the channel dim among the last three if they look like an image."""
    for dim in (dims[:1] + dims[-1:]) if len(dims) == 3 else ():
        if shape[dim] == 3 and min(shape[d] for d in dims if d != dim) >= _PICTURE:
            return dim
    return None


def _index(part: str, size: int) -> int:
    wanted = int(part) if part.isascii() and part.isdecimal() and len(part) < 16 else 0
    return max(min(wanted, size - 1), 0)
