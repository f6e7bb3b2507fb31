"""Raw values: one array per (dtype, [samples, *dims]), with a lane per slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dense import runs_of
from .layout import RAW_DTYPES, ArrayForm, raw_form, round_up
from .logs import Log

_DIRECT_BYTES = 256 << 10  # larger tensors are written in place, without stacking


@dataclass
class _RawArray:
    form: ArrayForm
    lanes: dict[int, int]  # slot -> lane

    @property
    def lane_chunk(self) -> int:
        return self.form.chunk[1]


@dataclass(frozen=True)
class ValuePiece:
    """One write: `data` [records, lanes, samples, *dims] at (record offset, lane)."""

    form: ArrayForm
    offset: int
    lane: int
    data: NDArray[Any]


class ValueTable:
    """Assigns arrays and lanes to slots, and groups the values of a commit into few writes."""

    def __init__(self, arrays: Log, lanes: Log) -> None:
        self._arrays_log = arrays
        self._lanes_log = lanes
        self._arrays: dict[str, _RawArray] = {}
        self._staged: list[tuple[str, int | None]] = []

    def resume(
        self, forms: Mapping[str, ArrayForm], lanes: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Restore the arrays and lanes of a resumed run."""
        self._arrays = {
            name: _RawArray(form, dict(lanes.get(name, {}))) for name, form in forms.items()
        }

    def pieces(self, values: Sequence[dict[int, NDArray[Any]]]) -> Iterator[ValuePiece]:
        """Yield the writes of a commit; `values[i]` maps slots to values of its record `i`."""
        grouped: dict[str, list[tuple[int, int, NDArray[Any]]]] = {}
        for offset, by_slot in enumerate(values):
            for slot, value in by_slot.items():
                stored = _storable(value)
                name, lane = self._place(slot, stored)
                grouped.setdefault(name, []).append((offset, lane, stored))
        for name, entries in grouped.items():
            yield from _stacked(self._arrays[name], entries)

    def index(self, values: Sequence[dict[int, NDArray[Any]]]) -> list[list[Any]]:
        """Return which values each record contains, as runs of [offset, {array: [slots]}]."""
        present: list[dict[str, list[int]]] = []
        for by_slot in values:
            record: dict[str, list[int]] = {}
            for slot, value in by_slot.items():
                stored = _storable(value)
                record.setdefault(_form(stored.dtype, stored.shape).name, []).append(slot)
            present.append(record)
        return runs_of(present)

    def accept(self) -> None:
        """Mark the staged arrays and lanes as written."""
        self._staged = []

    def discard(self) -> None:
        """Remove the arrays and lanes staged by the failed commit."""
        for name, slot in reversed(self._staged):
            if slot is None:
                del self._arrays[name]
            else:
                del self._arrays[name].lanes[slot]
        self._staged = []

    def _place(self, slot: int, value: NDArray[Any]) -> tuple[str, int]:
        form = _form(value.dtype, value.shape)
        array = self._arrays.get(form.name)
        if array is None:
            array = self._arrays[form.name] = _RawArray(form, {})
            self._arrays_log.stage(form.to_json())
            self._staged.append((form.name, None))
        lane = array.lanes.get(slot)
        if lane is None:
            lane = array.lanes[slot] = len(array.lanes)
            self._lanes_log.stage([form.name, slot])
            self._staged.append((form.name, slot))
        return form.name, lane


def array_of(value: NDArray[Any]) -> str:
    """Return the name of the array in which a value is stored."""
    stored = _storable(value)
    return _form(stored.dtype, stored.shape).name


@lru_cache(maxsize=4096)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArrayForm:
    return raw_form(dtype.name, shape, dtype.itemsize)


def _storable(value: NDArray[Any]) -> NDArray[Any]:
    """Widen the few dtypes that zarr does not support; return other arrays unchanged."""
    if not _has_name(value.dtype):
        return value.astype(np.float32)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


@lru_cache(maxsize=64)
def _has_name(dtype: np.dtype[Any]) -> bool:
    return dtype.name in RAW_DTYPES


def _stacked(
    array: _RawArray, entries: list[tuple[int, int, NDArray[Any]]]
) -> Iterator[ValuePiece]:
    if array.lane_chunk == 1 and entries[0][2].nbytes >= _DIRECT_BYTES:
        for offset, lane, value in entries:
            yield ValuePiece(array.form, offset, lane, value[None, None])
        return
    lanes = round_up(len(array.lanes), array.lane_chunk)
    of_record: dict[int, list[tuple[int, NDArray[Any]]]] = {}
    for offset, lane, value in entries:
        of_record.setdefault(offset, []).append((lane, value))
    for first, last in _consecutive(sorted(of_record)):
        shape = (last - first + 1, lanes, *entries[0][2].shape)
        data = np.zeros(shape, entries[0][2].dtype)
        for row, offset in enumerate(range(first, last + 1)):
            for lane, value in of_record[offset]:
                data[row, lane] = value
        yield ValuePiece(array.form, first, 0, data)


def _consecutive(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers."""
    first = previous = offsets[0]
    for offset in offsets[1:]:
        if offset != previous + 1:
            yield first, previous
            first = offset
        previous = offset
    yield first, previous
