"""Plausibility checks for a run's metadata, which is untrusted.

If a number is too large, the reader would allocate too much memory or use an index that is out of
range. Every function raises ValueError, TypeError or KeyError; callers add the key's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.bins import SPACINGS
from comgra_decl.records import AXIS_NAME, ENDED, SlotInfo

from .layout import (
    LOGS,
    RAW_DTYPES,
    RECORDS_ARRAY,
    ArrayForm,
    RecordColumn,
    standard_forms,
)
from .surviving import LOST

if TYPE_CHECKING:
    from .meta import RunMeta

_RECORDS = 1 << 24
"""Maximum number of records that a reader opens; their facts take 1.6 GB."""

_CHUNK_BYTES = 256 << 20
_ROWS = 1 << 26
_DIMS = 32  # TensorStore's limit
_STATISTICS = 4096
_SAMPLES = 65536  # as in the spec
_BINS = 4096
_ELEMENTS = 1 << 48  # of a tensor; more would not fit into any memory
_MOST_DIMS = 64  # torch's limit
_NAMES = 4096  # of a tied parameter
_MOST_AXES = 32  # of a preview
_HOW = ("all", "first", "mean")  # see `records.Axis`
_EARLIEST, _LATEST = 0.0, 1e11  # in Unix seconds; the range that calendars support
_DEEPEST = 100  # nesting of user JSON; recursive printing uses the stack
_TABLES = ("versions", "git", "host", "ranks")
_EXACT = float(1 << 53)  # integers up to this are exact in float64


def check_head(head: Mapping[str, Any]) -> None:
    """Reject a head with impossible numbers."""
    _whole(head["n"], "n", _RECORDS)
    _whole(head.get("scalars", 0), "scalars", _ROWS)
    for name in LOGS:
        _whole(head["logs"].get(name, 0), f"logs.{name}", _ROWS)
    if not isinstance(head["documents"], dict):
        raise TypeError("'documents' is not a table")
    for name, revision in head["documents"].items():
        _whole(revision, f"documents.{name[:40]}", 1 << 62)
    if not _EARLIEST < float(head["time"]) < _LATEST:
        raise ValueError("'time' is not a time")
    if head.get("step") is not None:
        _whole(head["step"], "step", 1 << 53)
    for name in ("writer", "usage"):
        if not isinstance(head.get(name, {}), dict):
            raise TypeError(f"{name!r} is not a table")
    if not isinstance(head.get("error"), str | None):
        raise TypeError("'error' is not a string")
    if not isinstance(head.get("failed", False), bool):
        raise TypeError("'failed' is not a truth value")
    bool(head["closed"])
    check_sessions(head.get("sessions", []))


def check_summary(summary: Mapping[str, Any]) -> None:
    """Reject a summary of an ended run with an unknown state or impossible numbers."""
    if summary["state"] not in ENDED:
        raise ValueError("'state' is not that of an ended run")
    _whole(summary["records"], "records", _RECORDS)
    if summary["last_step"] is not None:
        _whole(summary["last_step"], "last_step", 1 << 53)
    started = summary["started"]
    if isinstance(started, str) or not _EARLIEST < float(started) < _LATEST:
        raise ValueError("'started' is not a time")
    if not isinstance(summary["error"], str | None):
        raise TypeError("'error' is not a string")


def check_sessions(lines: Any) -> None:
    """Reject invalid entries of `head.sessions`."""
    if not isinstance(lines, list):
        raise TypeError("'sessions' is not a list")
    for line in lines:
        for name in ("record", "scalar", "note"):
            _whole(line[name], f"sessions.{name}", _ROWS)
        if not _EARLIEST < float(line["time"]) < _LATEST:
            raise ValueError("'sessions.time' is not a time")


def check_meta(meta: RunMeta) -> None:
    """Reject impossible run metadata."""
    names = meta.statistics
    if len(names) > _STATISTICS or len({*names}) != len(names):
        raise ValueError(f"{len(names)} statistics have {len({*names})} different names")
    _whole(meta.sample_count, "sample_count", _SAMPLES)
    if meta.spacing not in SPACINGS:
        raise ValueError(f"'spacing' is {meta.spacing!r}, not one of {SPACINGS}")
    if meta.bins is not None and not 1 <= meta.bins <= _BINS:
        raise ValueError(f"'bins' is {meta.bins}, not between 1 and {_BINS}")
    if not _EARLIEST < meta.started < _LATEST:
        raise ValueError("'started' is not a time")
    if not isinstance(meta.config, dict | None):
        raise TypeError("'config' is not a table")
    for name in _TABLES:
        if not isinstance(meta.facts.get(name), dict | None):
            raise TypeError(f"'facts.{name}' is not a table")
    for name in ("spec", "config", "facts", "writer"):
        check_depth(getattr(meta, name), name)


def check_depth(content: Any, name: str) -> None:
    """Raise ValueError for JSON nested too deeply."""
    level = [content]
    for _ in range(_DEEPEST):
        level = [
            part
            for entry in level
            if isinstance(entry, dict | list)
            for part in (entry.values() if isinstance(entry, dict) else entry)
        ]
        if not level:
            return
    raise ValueError(f"{name!r} is nested more than {_DEEPEST} levels deep")


def check_slot(slot: SlotInfo) -> SlotInfo:
    """Return a row of the slot table if it is plausible."""
    texts = (*slot.key[:2], slot.key.pass_, slot.kind, slot.dtype, slot.module_class, *slot.names)
    texts = (*texts, *slot.axes)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name is not a string")
    check_shape(slot.shape)
    if len(slot.names) > _NAMES:
        raise ValueError(f"a tensor cannot have {len(slot.names)} names")
    _whole(slot.key.iteration, "iteration", 1 << 53)
    if slot.batch_dim is not None:
        _whole(slot.batch_dim, "batch_dim", max(0, len(slot.shape) - 1))
    for part in () if slot.piece is None else slot.piece:
        for extent in part:
            _whole(extent, "piece", _ELEMENTS)
    for number in () if slot.image is None else chain(*slot.image):
        if not math.isfinite(number):
            raise ValueError("a normalisation is not finite")
    return slot


def check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape if it is plausible."""
    for extent in shape:
        _whole(extent, "shape", _ELEMENTS)
    if len(shape) > _MOST_DIMS or math.prod(shape) > _ELEMENTS:
        raise ValueError(f"a tensor cannot have the shape {str(shape)[:80]}")
    return shape


def check_forms(forms: Mapping[str, ArrayForm], meta: RunMeta) -> None:
    """Reject arrays whose statistics, samples or bins differ from the run's."""
    if not forms:
        return
    # slots per chunk depend on the initial number of slots; everything else is fixed
    standard = standard_forms(
        slots=1,
        columns=len(meta.columns),
        samples=meta.sample_count,
        statistics=len(meta.statistics),
        bins=meta.bins,
        counts=meta.counts_dtype,
    )
    block = forms["kpi/blk"].chunk[0] if "kpi/blk" in forms else 0
    for wanted in standard:
        form = forms.get(wanted.name)
        if form is None:
            if wanted.name == RECORDS_ARRAY:
                continue  # not in older runs
            raise ValueError(f"there is no array {wanted.name!r}")
        if (form.shape, form.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"the array {wanted.name!r} has {form.dtype} {list(form.shape)}; for the run's "
                f"statistics, samples and bins it must be {wanted.dtype} {list(wanted.shape)}"
            )
        rows = block if wanted.name.endswith("/blk") else wanted.chunk[0]
        if form.chunk[0] != rows:
            raise ValueError(f"the array {wanted.name!r} has chunks of {form.chunk[0]} records")


def check_form(form: ArrayForm) -> ArrayForm:
    """Return an array form if it is valid."""
    if form.dtype not in RAW_DTYPES:
        raise ValueError(f"unknown dtype {form.dtype!r}")
    if not 1 <= len(form.shape) == len(form.chunk) <= _DIMS:
        raise ValueError(f"shape {form.shape} and chunk {form.chunk} do not match")
    if min(form.chunk) < 1 or min(form.shape) < 0 or max(form.shape) >= 1 << 62:
        raise ValueError(f"shape {form.shape} or chunk {form.chunk} is impossible")
    if math.prod(form.chunk) * 16 > _CHUNK_BYTES * _itemsize_share(form.dtype):
        raise ValueError(f"a chunk of {form.chunk} is larger than any chunk this package writes")
    return form


def check_records(facts: NDArray[np.float64], names: Mapping[str, Sequence[str]], n: int) -> None:
    """Reject facts of records with codes out of range; there are `n` records."""
    lost = facts[:, RecordColumn.STEP] == LOST
    there = facts[~lost] if lost.any() else facts
    if not len(there):
        return
    smallest, largest = there.min(axis=0), there.max(axis=0)  # NaN if any is NaN
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
    """Return the JSON facts of records if they are well-formed."""
    for name in ("samples", "extra", "values"):
        for offset, value in facts[name]:
            _whole(offset, "offset", 1 << 40)
            if not isinstance(value, list if name == "samples" else dict):
                raise TypeError(f"a record has {name} of type {type(value).__name__}")
    for _, stored in facts["values"]:
        if not all(isinstance(slots, list) for slots in stored.values()):
            raise TypeError("the slots with raw values are not a list")
    for offset, index in facts.get("previews", ()):  # older runs have none
        _whole(offset, "offset", 1 << 40)
        _check_previews(index)
    return dict(facts)


def _check_previews(index: Any) -> None:
    """Reject an index of previews that cannot have been written by this package."""
    if not isinstance(index, dict):
        raise TypeError(f"a record has previews of type {type(index).__name__}")
    for name, groups in index.items():
        extents = name.rpartition("/")[2].split("x")
        for axes, slots in groups:
            if not isinstance(slots, list):
                raise TypeError("slots with previews are not a list")
            for slot in slots:
                _whole(slot, "slot", _ELEMENTS)
            if len(axes) > _MOST_AXES:
                raise ValueError("a preview has too many axes")
            for axis, extent in zip(axes, extents, strict=True):
                _check_axis(axis, int(extent))


def _check_axis(axis: Any, kept: int) -> None:
    """Reject an impossible axis of a preview; `kept` is the number of entries kept along it."""
    name, how, size = axis
    if not isinstance(name, str) or not AXIS_NAME.fullmatch(name) or how not in _HOW:
        raise ValueError("an axis of a preview is invalid")
    _whole(size, "size of an axis", _ELEMENTS)
    if size < kept or (how == "all" and size != kept):
        raise ValueError("an axis of a preview has an impossible size")


def check_edges(edges: Sequence[tuple[int, int, bool]], *, nodes: int) -> None:
    """Reject edges with nodes out of range."""
    if not all(0 <= source < nodes and 0 <= sink < nodes for source, sink, _ in edges):
        raise ValueError("an edge refers to a missing node")


def _whole(number: Any, name: str, limit: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= limit:
        raise ValueError(f"{name!r} is {str(number)[:40]}, not a whole number up to {limit}")


def _itemsize_share(dtype: str) -> float:
    """Return 16 / bytes per element for dtypes known to numpy; else 16."""
    try:
        return 16 / np.dtype(dtype).itemsize
    except TypeError:  # an ml_dtypes dtype of one or two bytes
        return 8.0
