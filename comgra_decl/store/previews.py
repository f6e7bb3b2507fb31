"""Where the previews of a record are: they lie in the arrays of values, beside their meaning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from comgra_decl.records import AXIS_NAME, Axis, StoredPreview

_HOW = ("all", "first", "mean")
_MOST_AXES = 32

Index = dict[str, list[list[Any]]]
"""By array: [[axes, slots], ...], where axes are [[name, how, size], ...]."""


def preview_index(
    previews: Mapping[int, StoredPreview], array_of: Callable[[NDArray[Any]], str]
) -> Index:
    """Returns the index of a record's previews, as stored; `array_of` names a value's array."""
    groups: dict[str, dict[tuple[Axis, ...], list[int]]] = {}
    for slot, preview in previews.items():
        axes = groups.setdefault(array_of(preview.values), {})
        axes.setdefault(preview.axes, []).append(slot)
    return {
        name: [[[list(axis) for axis in axes], slots] for axes, slots in by_axes.items()]
        for name, by_axes in groups.items()
    }


def find_preview(index: Index, slot: int) -> tuple[str, tuple[Axis, ...]] | None:
    """Returns the array and the axes of a slot's preview; None if there is none."""
    for name, groups in index.items():
        for axes, slots in groups:
            if slot in slots:
                return name, tuple(Axis(*axis) for axis in axes)
    return None


def check_previews(index: Any) -> None:
    """Rejects an index that this package cannot have written.

    Raises:
        TypeError, ValueError: it is malformed.
    """
    if not isinstance(index, dict):
        raise TypeError(f"previews of a record are {type(index).__name__}")
    for name, groups in index.items():
        extents = name.rpartition("/")[2].split("x")
        for axes, slots in groups:
            if not (isinstance(slots, list) and all(_is_whole(slot) for slot in slots)):
                raise TypeError("slots with previews are not a list of numbers")
            if len(axes) > _MOST_AXES:
                raise ValueError("a preview has too many axes")
            for axis, extent in zip(axes, extents, strict=True):
                check_axis(axis, int(extent))


def check_axis(axis: Any, kept: int) -> None:
    """Rejects an impossible axis of a preview that keeps `kept` entries along it."""
    name, how, size = axis
    if not isinstance(name, str) or not AXIS_NAME.fullmatch(name) or how not in _HOW:
        raise ValueError("an axis of a preview is invalid")
    if not _is_whole(size) or size < kept or (how == "all" and size != kept):
        raise ValueError("an axis of a preview has an impossible size")


def _is_whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 62
