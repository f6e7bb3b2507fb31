"""zarr v3: a group of arrays with named dims, readable by zarr, xarray, TensorStore and others.

Written with TensorStore, so no other package is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from .arrays import Form, forms, pieces, record_columns
from .content import Content
from .plain import plain_columns

_CHUNK_BYTES = 1 << 20
_HELD_BYTES = 64 << 20
"""Maximum size, in bytes, of values waiting for a full chunk."""

# The draft is written without sync and published by one rename. Otherwise, each chunk would wait
# for the disk.
_CONTEXT = {"file_io_sync": False, "cache_pool": {"total_bytes_limit": _HELD_BYTES}}

_NAMED = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
)
"""Dtypes that every zarr v3 reader supports; others (bfloat16, ...) are converted to float32."""


def write(content: Content, to: Path) -> None:
    """Write the group `to`: arrays of statistics, and a group `values` of raw values."""
    attributes = json.loads(json.dumps(content.facts, default=str))
    slots = plain_columns(content.slots.drop(columns=["shape", "names"]).reset_index())
    attributes["slots"] = json.loads(slots.to_json(orient="records"))
    attributes["types"] = content.run.types
    _write_group(to, attributes)
    context = ts.Context(_CONTEXT)
    for name, column in {**record_columns(content), "slot": content.ids}.items():
        dim = "slot" if name == "slot" else "record"
        array = _create(to, Form(name, column.shape, str(column.dtype), (dim,)), context)
        if len(column):
            array.write(column).result()
    arrays = {form.name: _create(to, form, context) for form in forms(content)}
    for name, first, data in pieces(content):
        arrays[name][first : first + len(data)].write(np.ascontiguousarray(data)).result()
    _write_values(content, to / "values", context)


class _Kept:
    """Values of one slot, shape and dtype, as an array that grows record by record."""

    def __init__(
        self, group: Path, name: str, value: NDArray[Any], most: int, *, context: ts.Context
    ) -> None:
        stored = value.dtype.name if value.dtype.name in _NAMED else "float32"
        dims = ("record", "sample", *(f"dim_{axis}" for axis in range(value.ndim - 1)))
        form = Form(name, (most, *value.shape), stored, dims[: 1 + value.ndim])
        self._array = _create(group, form, context)
        self._wanted = _chunk(form)[0]  # records per chunk
        self._held: list[NDArray[Any]] = []
        self._path = group / name / "zarr.json"
        self._stored = stored
        self.dtype = value.dtype.name
        self.records: list[int] = []

    @property
    def held(self) -> int:
        """Number of bytes waiting for a full chunk."""
        return sum(value.nbytes for value in self._held)

    def add(self, record: int, value: NDArray[Any]) -> None:
        """Add the values of the next record; each chunk is written once if possible."""
        self._held.append(value.astype(self._stored))
        self.records.append(record)
        if len(self.records) % self._wanted == 0:
            self.flush()

    def flush(self) -> None:
        """Write the waiting values."""
        if self._held:
            last = len(self.records)
            self._array[last - len(self._held) : last].write(np.stack(self._held)).result()
            self._held = []

    def end(self, attributes: dict[str, Any]) -> None:
        """Truncate the array to the written records and store its attributes."""
        self.flush()
        metadata = json.loads(self._path.read_text())
        metadata["shape"][0] = len(self.records)
        metadata["attributes"] = {**attributes, "dtype": self.dtype, "records": self.records}
        self._path.write_text(json.dumps(metadata))


def _write_values(content: Content, to: Path, context: ts.Context) -> None:
    """Write an array [k, samples, ...] for each slot, shape and dtype of the raw values."""
    _write_group(to, {})
    wanted, most = set(content.ids.tolist()), len(content.records)
    arrays: dict[str, tuple[int, _Kept]] = {}
    for record in content.records.index.tolist():
        for number, value in content.run.values_of(record).items():
            if number not in wanted:
                continue
            name = "_".join([str(number), value.dtype.name, "x".join(map(str, value.shape))])
            if name not in arrays:
                arrays[name] = number, _Kept(to, name, value, most, context=context)
            arrays[name][1].add(record, value)
        if sum(kept.held for _, kept in arrays.values()) > _HELD_BYTES:
            for _, kept in arrays.values():
                kept.flush()
    steps = content.records["step"]
    for number, kept in arrays.values():
        slot = content.slots.loc[number]
        facts = {key: _plain(slot[key]) for key in ("node", "role", "iteration", "pass")}
        kept.end({"slot": number, **facts, "steps": steps.loc[kept.records].tolist()})


def _create(group: Path, form: Form, context: ts.Context) -> ts.TensorStore:
    kinds = {"f": "NaN", "b": False, "c": ["NaN", "NaN"]}
    metadata = {
        "shape": list(form.shape),
        "data_type": form.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": _chunk(form)}},
        "fill_value": kinds.get(np.dtype(form.dtype).kind, 0),
        "dimension_names": list(form.dims),
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 3, "checksum": True}},
        ],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{group / form.name}/"},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=context, create=True).result()


def _chunk(form: Form) -> list[int]:
    """Return chunks of about 1 MB: record of all slots, or parts of a large record."""
    chunk = [max(1, extent) for extent in form.shape]
    size = np.dtype(form.dtype).itemsize
    for axis in range(len(chunk)):
        rest = size * int(np.prod(chunk[axis + 1 :], dtype=np.int64))
        chunk[axis] = max(1, min(chunk[axis], _CHUNK_BYTES // rest))
        if chunk[axis] > 1:
            break
    return chunk


def _write_group(folder: Path, attributes: dict[str, Any]) -> None:
    folder.mkdir()
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (folder / "zarr.json").write_text(json.dumps(group, indent=2))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
