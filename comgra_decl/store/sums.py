"""Checksums over each chunk's key and content, which detect swapped chunks.

zstd checks that a chunk is intact, but not that it is the requested chunk. If a data file is
replaced by another file of the same run, reads may return chunks of the same length from another
step. Each commit therefore also stores a CRC-32 of each chunk's name, numbers and content. The
checksums for all arrays of one kind are stored under `sums/row/<record>`, `sums/blk/<first
record>`, `sums/raw/<record>` or `sums/records/<first record>`. Readers compare each chunk when it
is first read. Runs of format version 2 have no such checksums.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError

from .database import Database
from .layout import RECORDS_ARRAY, ArrayForm, sums_key

Box = tuple[tuple[int, int], ...]
"""First index and index after the last, in each dim."""

Data = NDArray[np.generic]
Known = Mapping[str, Mapping[int, int]]
"""The checksums, by array name and by chunk number within the record or block."""

_AT_ONCE = 16 << 20  # bytes of chunks read at once for comparison
_KEPT = 16 << 20  # maximum total size of cached checksums, in bytes
_MOST_CHECKED = 200_000  # maximum number of chunks remembered as already compared
_MOST = 64 << 20  # maximum size of a key, in bytes


class SumsOfCommit:
    """Writer side: collects the checksums of one commit."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, dict[int, int]]] = {}

    def add(self, form: ArrayForm, first: int, data: Data, lane: int) -> None:
        """Add the whole chunks written at (first, lane) of an array."""
        # rows are written for each record, so names are not formatted chunk by chunk
        depth, inner = form.chunk[0], _grid(form.shape[1:], form.chunk[1:], lane, data.shape[1:])
        if not inner:
            return
        kind, name = _kind(form), f"{form.name}/".encode()
        for start in range(0, len(data), depth):
            at = first + start
            part = data[start : start + depth]
            key = sums_key(kind, at)
            chunks = self._found.setdefault(key, {}).setdefault(form.name, {})
            base = zlib.crc32(b"%d" % (at // depth), zlib.crc32(name))
            for number, tail, box in inner:
                chunks[number] = zlib.crc32(_memory(part[box]), zlib.crc32(tail, base))

    def join(self, others: SumsReader) -> set[str]:
        """Merge existing checksums under the same keys. Return these keys."""
        for key, names in self._found.items():
            for name, chunks in others.of_key(key).items():
                names[name] = {**chunks, **names.get(name, {})}
        return {*self._found}

    def __iter__(self) -> Iterator[tuple[str, Known]]:
        """Yield the keys to write and their checksums."""
        yield from self._found.items()


class SumsReader:
    """Reader side: compares each chunk once. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._known: dict[str, Known] = {}
        self._bytes = 0
        self._checked: set[tuple[str, tuple[int, ...]]] = set()
        self._lock = threading.Lock()

    def read(self, handle: ts.TensorStore, form: ArrayForm, index: Sequence[int | slice]) -> Data:
        """Return the part of an array selected by an index; compare its chunks when first read.

        Raises:
            DamagedRunError: a chunk differs from the one that was written at this position.
        """
        box = box_of(form, index)
        places = [place for place, _ in _chunks(form, box)]
        places = [place for place in places if (form.name, place) not in self._checked]
        whole = _aligned(form, box)
        if places and _bytes(whole, handle) <= _AT_ONCE:
            data: Data = handle[tuple(slice(*ends) for ends in whole)].read().result()
            self.compare(form, whole, data)
            self._note(form, places)
            part: Data = data[_within(index, box, whole)]
            return part if part.size == data.size else part.copy()  # frees the chunks
        self._check(handle, form, places)
        found: Data = handle[tuple(index)].read().result()
        return found

    def _check(
        self, handle: ts.TensorStore, form: ArrayForm, places: Sequence[tuple[int, ...]]
    ) -> None:
        """Compare chunks in portions, because they may be far larger than the requested part."""
        size = max(1, int(np.prod(form.chunk)) * handle.dtype.numpy_dtype.itemsize)
        at_once = max(1, _AT_ONCE // size)
        known = self._sums(sorted({key_of(form, place) for place in places}))
        for start in range(0, len(places), at_once):
            part = places[start : start + at_once]
            reads = [handle[_inside(form, place)].read() for place in part]
            for place, read in zip(part, reads, strict=True):
                self._compare(known[key_of(form, place)], form, place, read.result())
        self._note(form, places)

    def _note(self, form: ArrayForm, places: Sequence[tuple[int, ...]]) -> None:
        with self._lock:
            if len(self._checked) > _MOST_CHECKED:
                self._checked.clear()
            self._checked.update((form.name, place) for place in places)

    def compare(self, form: ArrayForm, box: Box, data: Data) -> None:
        """Compare chunks that were already read.

        Args:
            form: form of their array.
            box: their box; its edges align with chunks.
            data: data read from the box.

        Raises:
            DamagedRunError: a chunk differs from the one that was written at this position.
        """
        parts = list(_chunks(form, box))
        known = self._sums(sorted({key_of(form, place) for place, _ in parts}))
        for place, part in parts:
            self._compare(known[key_of(form, place)], form, place, data[part])

    def of_key(self, key: str) -> Known:
        """Return the checksums in a key."""
        return self._sums([key])[key]

    def _compare(self, known: Known, form: ArrayForm, place: tuple[int, ...], data: Data) -> None:
        expected = known.get(form.name, {}).get(_number(form, place))
        if expected == _sum(form, place, data):
            return
        chunk = "/".join(map(str, place))
        why = "has no checksum" if expected is None else "is not the one written at this position"
        raise DamagedRunError(f"{self._db.path}: cannot read {form.name!r}: chunk {chunk} {why}")

    def _sums(self, keys: Sequence[str]) -> dict[str, Known]:
        with self._lock:
            found = {key: self._known[key] for key in keys if key in self._known}
        missing = [key for key in keys if key not in found]
        for start in range(0, len(missing), 512):
            part = missing[start : start + 512]
            for key, value in zip(part, self._db.read_all(part, most=_MOST), strict=True):
                found[key] = self._parsed(key, value)
                self._keep(key, found[key], len(value))
        return found

    def _keep(self, key: str, known: Known, size: int) -> None:
        with self._lock:
            if self._bytes > _KEPT:
                self._known, self._bytes = {}, 0
            self._known[key] = known
            self._bytes += 12 * size  # size as a dict

    def _parsed(self, key: str, value: bytes) -> Known:
        try:
            return unpacked(key, value)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedRunError(f"{self._db.path}: key {key!r} is damaged: {error}") from error


def packed(key: str, known: Known) -> bytes:
    """Encode the bytes of a key: a JSON line with names and counts, numbers, a checksum."""
    names = _names_line(tuple([(name, len(chunks)) for name, chunks in known.items()]))
    numbers = [
        struct.pack(f"<{2 * len(chunks)}I", *chunks, *chunks.values()) for chunks in known.values()
    ]
    content = b"".join([names, *numbers])
    return content + zlib.crc32(content, zlib.crc32(key.encode())).to_bytes(4, "little")


@lru_cache(maxsize=256)
def _names_line(counts: tuple[tuple[str, int], ...]) -> bytes:
    return json.dumps(dict(counts)).encode() + b"\n"


def unpacked(key: str, value: bytes) -> Known:
    """Decode bytes from `packed`. Raises ValueError or a similar error if they are damaged."""
    content, seal = value[:-4], int.from_bytes(value[-4:], "little")
    if len(value) < 4 or zlib.crc32(content, zlib.crc32(key.encode())) != seal:
        raise ValueError("its checksum does not match")
    names, _, rest = content.partition(b"\n")
    counts, found, at = json.loads(names), {}, 0
    for name, count in counts.items():
        numbers = np.frombuffer(rest, "<u4", 2 * count, at).reshape(2, count)
        found[str(name)] = dict(zip(*numbers.tolist(), strict=True))
        at += numbers.nbytes
    return found


def key_of(form: ArrayForm, place: Sequence[int]) -> str:
    """Return the key of a chunk's checksum."""
    return sums_key(_kind(form), place[0] * form.chunk[0])


def _kind(form: ArrayForm) -> str:
    if form.name == RECORDS_ARRAY:
        return form.name
    return "raw" if form.name.startswith("raw/") else form.name.rpartition("/")[2]


def box_of(form: ArrayForm, index: Sequence[int | slice]) -> Box:
    """Return the box selected by an index; dims not in the index are selected completely."""
    ends = []
    for axis, extent in enumerate(form.shape):
        chosen = index[axis] if axis < len(index) else slice(None)
        if isinstance(chosen, slice):
            low, high, _ = chosen.indices(extent)
            ends.append((low, max(low, high)))
        else:
            ends.append((int(chosen), int(chosen) + 1))
    return tuple(ends)


def _chunks(form: ArrayForm, box: Box) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the chunks that overlap a box, and their positions within the box."""
    if any(low >= high for low, high in box):
        return
    spans = [
        range(low // chunk, -(-high // chunk))
        for (low, high), chunk in zip(box, form.chunk, strict=True)
    ]
    for place in product(*spans):
        edges = zip(place, form.chunk, box, strict=True)
        yield (
            place,
            tuple(
                slice(max(at * chunk, low) - low, min((at + 1) * chunk, high) - low)
                for at, chunk, (low, high) in edges
            ),
        )


def _aligned(form: ArrayForm, box: Box) -> Box:
    """Return the box of whole chunks that overlap a box, clipped to the array."""
    return tuple(
        (low // chunk * chunk, max(low, min(-(-high // chunk) * chunk, extent)))
        for (low, high), chunk, extent in zip(box, form.chunk, form.shape, strict=True)
    )


def _within(index: Sequence[int | slice], box: Box, whole: Box) -> tuple[int | slice, ...]:
    """Return an index relative to the box that was read."""
    return tuple(
        slice(low - start, high - start)
        if axis >= len(index) or isinstance(index[axis], slice)
        else low - start
        for axis, ((low, high), (start, _)) in enumerate(zip(box, whole, strict=True))
    )


def _bytes(box: Box, handle: ts.TensorStore) -> int:
    return math.prod(high - low for low, high in box) * int(handle.dtype.numpy_dtype.itemsize)


def _inside(form: ArrayForm, place: Sequence[int]) -> tuple[slice, ...]:
    """Return a chunk's box, clipped to the array."""
    return tuple(
        slice(at * chunk, min((at + 1) * chunk, extent))
        for at, chunk, extent in zip(place, form.chunk, form.shape, strict=True)
    )


def _number(form: ArrayForm, place: Sequence[int]) -> int:
    """Return a chunk's number within its record or block."""
    number = 0
    for at, chunk, extent in zip(place[1:], form.chunk[1:], form.shape[1:], strict=True):
        number = number * -(-extent // chunk) + at
    return number


def _sum(form: ArrayForm, place: Sequence[int], data: Data) -> int:
    name = f"{form.name}/{'/'.join(map(str, place))}".encode()
    return zlib.crc32(_memory(data), zlib.crc32(name))


def _memory(data: Data) -> memoryview:
    return np.ascontiguousarray(data).view(np.uint8).data


@lru_cache(maxsize=4096)
def _grid(
    shape: tuple[int, ...], chunk: tuple[int, ...], lane: int, written: tuple[int, ...]
) -> tuple[tuple[int, bytes, tuple[slice, ...]], ...]:
    """Return the chunks of one record or block, for a write of `written` elements from `lane` on.

    Each is its number, the end of its name, and its position within the written data. `shape` and
    `chunk` are those of the array. All omit the record dim.
    """
    row = ArrayForm("", "", (1, *shape), (1, *chunk), 0)
    low = (0, lane, *[0] * (len(written) - 1))
    box = tuple((at, at + extent) for at, extent in zip(low, (1, *written), strict=True))
    return tuple(
        (
            _number(row, place),
            "".join(f"/{at}" for at in place[1:]).encode(),
            (slice(None), *part[1:]),
        )
        for place, part in _chunks(row, box)
    )
