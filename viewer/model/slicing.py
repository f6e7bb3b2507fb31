"""Which dims of a tensor are the rows and columns of a table; the others are held at an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS, COLOUR = "y", "x", "c"
AXES = (ROWS, COLUMNS, COLOUR)

_PICTURE = 8  # smaller maps of three channels are no photographs

Place = str | int


@dataclass(frozen=True, slots=True)
class Slicing:
    """For each dim "y" (rows), "x" (columns), "c" (red, green, blue) or an index.

    Each of the axes at most once, and at least one unless there are no dims.
    """

    places: tuple[Place, ...]

    @property
    def text(self) -> str:
        """What the address says: "0,y,x"."""
        return ",".join(map(str, self.places))

    def dim(self, axis: str) -> int | None:
        """Returns the dim that lies along an axis."""
        return self.places.index(axis) if axis in self.places else None

    def put(self, dim: int, place: Place) -> Slicing:
        """Returns what holds after a dim was given a place; who had that axis takes its old one."""
        places = list(self.places)
        holder = self.dim(place) if isinstance(place, str) else None
        if holder is not None:
            places[holder] = places[dim]
        places[dim] = place
        return Slicing(tuple(places))


def slicing_for(
    text: str, shape: Sequence[int], *, fixed: int | None = None, picture: bool = False
) -> Slicing:
    """Returns the slicing that a text means for a shape: what fits of it is kept.

    Args:
        text: As of `Slicing.text`; untrusted. Of another rank, or nonsense: the last two dims are
            rows and columns, the others at their first index.
        shape: Sizes of the dims.
        fixed: Index at which the first dim is held, whatever the text says.
        picture: Whether three channels are colours where nothing else is asked for.
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
    """Returns the cells [rows, columns], or [rows, columns, 3] if a dim is the colour."""
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
    """Returns the dim of the three channels among the last three, if they look like a picture."""
    for dim in (dims[:1] + dims[-1:]) if len(dims) == 3 else ():
        if shape[dim] == 3 and min(shape[d] for d in dims if d != dim) >= _PICTURE:
            return dim
    return None


def _index(part: str, size: int) -> int:
    wanted = int(part) if part.isascii() and part.isdecimal() and len(part) < 16 else 0
    return max(min(wanted, size - 1), 0)
