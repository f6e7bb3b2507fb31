"""The layout of a run on disk: key names, array forms, chunk sizes.

One OCDBT database contains a whole run (of one rank). Arrays are preallocated and written once: a
chunk never changes after its commit. Each family of arrays exists twice. In `row`, a chunk holds
one record and is written with every commit, so that reading a record takes a single read. In `blk`,
a chunk holds `block_steps` records and a few columns and is written when a block is full, so that
reading a series takes few reads. If all records in a block are in the same commit, they are stored
only as a block, as indicated by the `FORM` record column. The numeric facts of records are stored a
third time, in the few large chunks of `records`, so that opening a long run takes few reads. Long
runs also have keys with the extremes of every 256 records, which overviews read (`levels.py`).

Scalars (values logged at any step) are stored similarly, but without arrays. Each commit writes its
scalars as one key, and each block of scalars is written as one key once it is full. `head.scalars`
is the number of scalars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

DATABASE = "trace.ocdbt"
FORMAT = "comgra-decl-run"
VERSION = 5
MIN_READER = 2
"""Oldest format version that can be read."""

BOUND_SINCE = 3
"""First version in which checksums cover the key; see `sums.py`."""

SHAPES_SINCE = 4
"""First version in which records store changed tensor shapes."""

SPACED_SINCE = 5
"""First version in which bins need not be equally wide."""

RUN_KEY = "meta/run.json"
LEVELS = "levels/"
"""Prefix of the keys of the level of detail, which is derived from other data."""

SESSION_KEY = "meta/run.{}.json"
"""Like `RUN_KEY`, but for each program that resumed the run; numbering starts at 2."""

HEAD_KEY = "head"
FILES_KEY = "meta/files.json"
"""The data files that earlier merges have written; see `merging.py`."""

DIGITS = 12  # of record and row numbers in keys, so that keys sort numerically

RECORDS_LIMIT = 1 << 40
SLOTS_LIMIT = 1 << 20
COLUMNS_LIMIT = 1 << 16
SHAPES_LIMIT = 1 << 24
"""Shape codes are exact in float32 up to this limit, which no run reaches."""

LOGS = ("slots", "names", "arrays", "lanes", "notes")
"""Append-only tables of JSON rows; `head.logs` holds the number of valid rows in each."""

SCALAR_BLOCK = 1024
"""Scalars per block. A scalar is a value logged at any step; see `scalars.py`."""

NODE_BYTES = 4096
"""Size limit of an index node. With the default (84 MB), the size of a run would grow
quadratically."""


RAW_DTYPES = frozenset(
    """
    bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64
    float16 bfloat16 float32 float64 complex64 complex128
    float8_e3m4 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz
    """.split()
)
"""Dtypes of raw values stored unchanged (numpy and ml_dtypes names)."""


class RecordColumn(IntEnum):
    """Leading columns of the `kpi` arrays: the numeric facts of a record, all float64."""

    STEP = 0
    TIME = 1
    TYPE = 2  # row in the "type" name table
    MODE = 3  # row in the "mode" name table
    STRUCTURE = 4  # row in the "structure" name table, -1 for none
    BATCH_SIZE = 5  # -1 for unknown
    COST = 6
    WIDTH = 7  # slot columns written with this record
    KPIS = 8  # kpi columns written with this record
    FACTS = 9  # number of the record that stores this record's JSON facts
    FORM = 10  # 0: stored as a row (and in a block later), 1: stored in a block only
    TAGS = 11  # 1 + row in the "tags" name table (a JSON list of labels), 0 for none


SYSTEM_COLUMNS = 12
KPI_CHUNK = 16
RECORDS_ARRAY = "records"
RECORDS_CHUNK = 8192
"""Number of records per chunk in the array with the second copy of all records' numeric facts."""

MISSING_BITS = 0x7FF8_4D49_5353_4544
"""A NaN with a payload: a KPI that was not recorded, as opposed to a recorded NaN."""


@dataclass(frozen=True)
class ArrayForm:
    """Form of an array. It is stored in the array table, which readers use to open the array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    fill: Any

    def to_json(self) -> dict[str, Any]:
        """Return the form as a row of the array table."""
        return {**vars(self), "shape": list(self.shape), "chunk": list(self.chunk)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ArrayForm:
        """Return the form stored in a row of the array table."""
        shape, chunk = tuple(map(int, row["shape"])), tuple(map(int, row["chunk"]))
        return cls(str(row["name"]), str(row["dtype"]), shape, chunk, row["fill"])

    def metadata(self) -> dict[str, Any]:
        """Return the zarr v3 metadata of the array."""
        return {
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "fill_value": self.fill,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                # the checksum detects flipped bits; OCDBT itself does not
                {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
            ],
        }


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def slot_chunk(slots: int) -> int:
    """Return the slot width of row chunks for a run that starts with this many slots."""
    return min(256, max(32, round_up(slots, 32)))


def block_steps(record_bytes: int) -> int:
    """Return the number of records per block: a power of two, from 32 to 256.

    Longer blocks reduce the number of reads per series. However, the open block is held in memory,
    and its records are read one by one.

    Args:
        record_bytes: size of the dense statistics of a record.
    """
    return max(32, min(256, _power_of_two(_OPEN_BLOCK_BYTES // max(1, record_bytes))))


_OPEN_BLOCK_BYTES = 32 << 20
"""Maximum size, in bytes, of the open block in the writer's memory, unless 32 records need more."""

_BLOCK_CHUNK_BYTES = 64 << 10
"""Target size of a block's chunks in bytes. Reading a series reads this amount per block."""


def standard_forms(
    *, slots: int, columns: int, samples: int, statistics: int, bins: int | None, counts: str
) -> list[ArrayForm]:
    """Return the forms of all arrays that every run has.

    Args:
        slots: slots known at the first commit.
        columns: columns of the `agg` arrays.
        samples: recorded samples per slot.
        statistics: statistics per sample.
        bins: histogram bins, None for no histograms.
        counts: dtype of the histogram counts.
    """
    width = slot_chunk(slots)
    per_slot = 4 * (columns + samples * statistics) + (bins or 0) * (2 if counts == "uint16" else 4)
    block = block_steps(round_up(slots, width) * per_slot)
    both = (RECORDS_LIMIT, SLOTS_LIMIT)
    facts = ((1, KPI_CHUNK), (block, KPI_CHUNK))
    forms = [
        *_pair("kpi", "float64", (RECORDS_LIMIT, COLUMNS_LIMIT), *facts),
        *_pair("agg", "float32", (*both, columns), (1, width, columns), _narrow(block, width, 1)),
        _records_form(),
    ]
    if samples:
        inner = (samples, statistics)
        chunk = (*_narrow(block, 32, samples), 1)
        forms += _pair("smp", "float32", (*both, *inner), (1, width, *inner), chunk)
    if bins:
        forms += _pair("hist", counts, (*both, bins), (1, width, bins), _narrow(block, 8, bins))
    return forms


def _narrow(block: int, width: int, inner: int) -> tuple[int, int, int]:
    """Return a block array's chunk shape: few of `width` slots, to read a series cheaply."""
    aim = _power_of_two(_BLOCK_CHUNK_BYTES // (4 * block * inner))
    while width % aim:  # rows are padded to whole row chunks, which must align with these chunks
        aim //= 2
    return block, min(width, aim), inner


def _records_form() -> ArrayForm:
    shape = (RECORDS_LIMIT, SYSTEM_COLUMNS)
    return ArrayForm(RECORDS_ARRAY, "float64", shape, (RECORDS_CHUNK, SYSTEM_COLUMNS), "NaN")


def _power_of_two(number: int) -> int:
    """Return the largest power of two that does not exceed `number`, but at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _pair(
    family: str, dtype: str, shape: tuple[int, ...], row: tuple[int, ...], block: tuple[int, ...]
) -> list[ArrayForm]:
    fill: int | str = "NaN" if dtype.startswith("float") else 0
    return [
        ArrayForm(f"{family}/row", dtype, shape, row, fill),
        ArrayForm(f"{family}/blk", dtype, shape, block, fill),
    ]


def raw_form(dtype: str, shape: Sequence[int], itemsize: int) -> ArrayForm:
    """Return the form of the array for raw values of one dtype and [samples, *value dims].

    Dims are [record, lane, *shape]. A chunk contains at most about 1 MB; if lanes are small, it
    contains several of them.
    """
    size = itemsize
    for extent in shape:
        size *= max(1, extent)
    lanes = max(1, min(16, (32 << 10) // size))
    chunk = _split(shape, itemsize)
    name = f"raw/{dtype}/{'x'.join(map(str, shape))}"
    full = (RECORDS_LIMIT, SLOTS_LIMIT, *shape)
    fill = False if dtype == "bool" else [0, 0] if dtype.startswith("complex") else 0
    return ArrayForm(name, dtype, full, (1, lanes, *chunk), fill)


def _split(shape: Sequence[int], itemsize: int, limit: int = 1 << 20) -> list[int]:
    """Split leading dims until a chunk has at most `limit` bytes: samples first, then rows."""
    chunk = [max(1, extent) for extent in shape]
    for axis in range(len(chunk)):
        rest = itemsize
        for extent in chunk[axis + 1 :]:
            rest *= extent
        chunk[axis] = max(1, min(chunk[axis], limit // rest))
        if chunk[axis] * rest <= limit:
            break
    return chunk


def log_key(log: str, first: int) -> str:
    """Return the key for the rows of a log from row `first` on."""
    return f"{log}/{first:0{DIGITS}d}.json"


def scalar_block_key(first: int) -> str:
    """Return the key of the block of `SCALAR_BLOCK` scalars from number `first` on."""
    return f"scalars/blk/{first:0{DIGITS}d}"


def scalar_piece_key(first: int) -> str:
    """Return the key of the scalars from `first` on that a commit wrote to an open block."""
    return f"scalars/row/{first:0{DIGITS}d}"


def sums_key(kind: str, first: int) -> str:
    """Return the key for the checksums of a kind of array, from record `first` on."""
    return f"sums/{kind}/{first:0{DIGITS}d}"


def step_key(first: int) -> str:
    """Return the key of the JSON facts of the records from `first` on."""
    return f"steps/{first:0{DIGITS}d}.json"


def graph_key(digest: str) -> str:
    """Return the key of a dependency graph."""
    return f"graphs/{digest}.json"


def document_key(name: str) -> str:
    """Return the key of a named document."""
    return f"docs/{name}.json"


def level_key(first: int, column: int, tile: int) -> str:
    """Return the key of the level of detail of a statistic; see `levels.py`."""
    return f"{LEVELS}{first:0{DIGITS}d}/{column}/{tile}"
