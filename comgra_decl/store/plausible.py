"""What a run says of itself is looked at before it is believed: it may come from anywhere.

A number that is too large would make the reader allocate what it says, or index what is not there.
Every function raises ValueError, TypeError or KeyError; who calls it knows the key and tells it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import LOGS, RAW_DTYPES, ArrayForm, RecordColumn
from .surviving import LOST

_RECORDS = 1 << 24
"""Most records a reader opens: their facts take 1.6 GB."""

_CHUNK_BYTES = 256 << 20
_ROWS = 1 << 26
_DIMS = 32  # TensorStore's limit
_EXACT = float(1 << 53)  # integers up to here are floats


def check_head(head: Mapping[str, Any]) -> None:
    """Refuses a head whose numbers nobody can have written."""
    _whole(head["n"], "n", _RECORDS)
    _whole(head.get("scalars", 0), "scalars", _ROWS)
    for name in LOGS:
        _whole(head["logs"].get(name, 0), f"logs.{name}", _ROWS)
    if not isinstance(head["documents"], dict):
        raise TypeError("'documents' is no table")
    if not math.isfinite(float(head["time"])):
        raise ValueError("'time' is not finite")
    bool(head["closed"])


def check_form(form: ArrayForm) -> ArrayForm:
    """Returns the form of an array if it can be one of ours."""
    if form.dtype not in RAW_DTYPES:
        raise ValueError(f"no dtype is called {form.dtype!r}")
    if not 1 <= len(form.shape) == len(form.chunk) <= _DIMS:
        raise ValueError(f"shape {form.shape} and chunk {form.chunk} do not fit")
    if min(form.chunk) < 1 or min(form.shape) < 0 or max(form.shape) >= 1 << 62:
        raise ValueError(f"shape {form.shape} or chunk {form.chunk} is impossible")
    if math.prod(form.chunk) * 16 > _CHUNK_BYTES * _itemsize_share(form.dtype):
        raise ValueError(f"a chunk of {form.chunk} is larger than any that is written")
    return form


def check_records(facts: NDArray[np.float64], names: Mapping[str, Sequence[str]], n: int) -> None:
    """Refuses facts of records that name what there is not; there are `n` records in all."""
    lost = facts[:, RecordColumn.STEP] == LOST
    there = facts[~lost] if lost.any() else facts
    if not len(there):
        return
    smallest, largest = there.min(axis=0), there.max(axis=0)  # NaN where there is one
    limits = {
        RecordColumn.STEP: (0, _EXACT),
        RecordColumn.TYPE: (0, len(names.get("type", ())) - 1),
        RecordColumn.MODE: (0, len(names.get("mode", ())) - 1),
        RecordColumn.STRUCTURE: (-1, len(names.get("structure", ())) - 1),
        RecordColumn.BATCH_SIZE: (-1, _EXACT),
        RecordColumn.WIDTH: (0, 1 << 20),
        RecordColumn.KPIS: (0, 1 << 16),
        RecordColumn.FACTS: (0, max(0, n - 1)),
        RecordColumn.FORM: (0, 1),
        RecordColumn.TAGS: (0, len(names.get("tags", ()))),
    }
    for column, (low, high) in limits.items():
        if not (smallest[column] >= low and largest[column] <= high):
            raise ValueError(f"a record's {column.name.lower()} is out of range")


def check_facts(facts: Any) -> dict[str, Any]:
    """Returns the JSON facts of records if they have the form in which they are written."""
    for name in ("samples", "extra", "values"):
        for offset, value in facts[name]:
            _whole(offset, "offset", 1 << 40)
            if not isinstance(value, list if name == "samples" else dict):
                raise TypeError(f"{name} of a record are {type(value).__name__}")
    for _, stored in facts["values"]:
        if not all(isinstance(slots, list) for slots in stored.values()):
            raise TypeError("slots with raw values are no list")
    return dict(facts)


def check_edges(edges: Sequence[tuple[int, int, bool]], *, nodes: int) -> None:
    """Refuses edges between nodes that there are not."""
    if not all(0 <= source < nodes and 0 <= sink < nodes for source, sink, _ in edges):
        raise ValueError("an edge to no node")


def _whole(number: Any, name: str, limit: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= limit:
        raise ValueError(f"{name!r} is {str(number)[:40]}, not a whole number up to {limit}")


def _itemsize_share(dtype: str) -> float:
    """Returns 16 / bytes per element, for the dtypes whose names numpy knows; else 16."""
    try:
        return 16 / np.dtype(dtype).itemsize
    except TypeError:  # of ml_dtypes: one or two bytes
        return 8.0
