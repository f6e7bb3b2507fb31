"""The index of a record's previews, which are stored in the arrays of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from comgra_decl.records import Axis, StoredPreview

Index = dict[str, list[list[Any]]]
"""For each array, [[axes, slots], ...], where axes are [[name, how, size], ...]."""


def preview_index(
    previews: Mapping[int, StoredPreview], array_of: Callable[[NDArray[Any]], str]
) -> Index:
    """Return the index of a record's previews as stored; `array_of` returns a value's array."""
    groups: dict[str, dict[tuple[Axis, ...], list[int]]] = {}
    for slot, preview in previews.items():
        axes = groups.setdefault(array_of(preview.values), {})
        axes.setdefault(preview.axes, []).append(slot)
    return {
        name: [[[list(axis) for axis in axes], slots] for axes, slots in by_axes.items()]
        for name, by_axes in groups.items()
    }


def find_preview(index: Index, slot: int) -> tuple[str, tuple[Axis, ...]] | None:
    """Return the array and the axes of a slot's preview; None if there is none."""
    for name, groups in index.items():
        for axes, slots in groups:
            if slot in slots:
                return name, tuple(Axis(*axis) for axis in axes)
    return None
