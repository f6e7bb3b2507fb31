"""Scalars: values logged at any step, stored compactly and loaded in few reads.

A scalar is (step, value, name, type); name and type are codes from the "scalar" and "type" name
tables. Rows are numbered, and `head.scalars` is their number. A commit writes its rows in the open
block under `scalars/row/<first>`, and each block that it completes under `scalars/blk/<first>`.
Reading a long curve therefore takes a few whole blocks and at most one open block. Each key is
written only once.

A key contains the columns one after another. Steps are stored as differences, and the bytes of each
column are grouped by significance, because the high bytes of a curve hardly change. The content is
compressed by zlib, whose checksum detects damage.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import DamagedRunError
from comgra_decl.records import ScalarBatch

from .commit import Commit
from .database import Database
from .layout import DIGITS, SCALAR_BLOCK, scalar_block_key, scalar_piece_key
from .logs import Names

_COLUMNS = {"step": "<i8", "value": "<f8", "name": "<u4", "type": "<u4"}
ROW = np.dtype(list(_COLUMNS.items()))
"""One scalar; `name` and `type` are codes."""

Rows = NDArray[np.void]

_MANY_BLOCKS = 1000

MOST_BYTES = 1 << 20
"""Maximum size of a key, in bytes; a block of random numbers takes 24 kB."""

LOST = int(np.iinfo(np.int64).min)
"""Step of an unreadable scalar. The scalar keeps its position, because scalars are numbered."""

_log = logging.getLogger("comgra_decl")


class ScalarTable:
    """Writer side: buffers the open block until it is full."""

    def __init__(self, names: Names, *, bound: bool) -> None:
        self._names = names
        self._bound = bound
        self._edge = 0  # number of the first row of the open block
        self._open = np.empty(0, ROW)
        self._staged: tuple[int, Rows] | None = None

    def write(self, commit: Commit, logged: Sequence[ScalarBatch]) -> int:
        """Write logged values; return the resulting number of scalars."""
        rows = np.concatenate([self._open, *map(self._rows, logged)])
        full = len(rows) // SCALAR_BLOCK * SCALAR_BLOCK
        for start in range(0, full, SCALAR_BLOCK):
            block = rows[start : start + SCALAR_BLOCK]
            self._put(commit, scalar_block_key(self._edge + start), block)
        rest = max(full, len(self._open))
        if rest < len(rows):
            self._put(commit, scalar_piece_key(self._edge + rest), rows[rest:])
        self._staged = self._edge + full, rows[full:].copy()
        return self._edge + len(rows)

    def _put(self, commit: Commit, key: str, rows: Rows) -> None:
        commit.put(key, packed(rows, key if self._bound else None))

    def accept(self) -> None:
        """Mark the staged scalars as written."""
        if self._staged is not None:
            self._edge, self._open = self._staged
            self._staged = None

    def discard(self) -> None:
        """Revert the staged scalars after a failed commit."""
        self._staged = None

    def resume(self, rows: Rows) -> None:
        """Restore the scalars of a resumed run.

        Raises:
            DamagedRunError: scalars of the open block are lost, so the block cannot be completed.
        """
        self._edge = len(rows) // SCALAR_BLOCK * SCALAR_BLOCK
        self._open = rows[self._edge :].copy()
        if (self._open["step"] == LOST).any():
            raise DamagedRunError("the newest scalars are damaged; the run cannot be resumed.")

    def _rows(self, logged: ScalarBatch) -> Rows:
        rows = np.empty(len(logged.names), ROW)
        rows["step"], rows["value"] = logged.steps, logged.values
        rows["name"] = self._names.codes("scalar", logged.names)
        rows["type"] = self._names.codes("scalar_type", logged.types)
        return rows


class ScalarReader:
    """Reader side: caches the scalars read so far and reads only new ones. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self.damage: list[str] = []
        """Parts that could not be read."""
        self._db = database
        self._rows = np.empty(0, ROW)
        self._lock = threading.Lock()

    def rows(self, count: int) -> Rows:
        """Return the first `count` scalars; unreadable ones have the step `LOST`."""
        with self._lock:
            if len(self._rows) < count:
                self._read(count)
            rows = self._rows[:count]
        rows.flags.writeable = False
        return rows

    def _read(self, count: int) -> None:
        edge = count // SCALAR_BLOCK * SCALAR_BLOCK
        known = len(self._rows)
        if known < edge:
            known = known // SCALAR_BLOCK * SCALAR_BLOCK  # the block is complete by now
            self._refuse_many_missing(known, edge)
        keys = dict(self._keys(known, edge, count))
        values = self._values(list(keys))
        parts = [self._part(*pair, value) for pair, value in zip(keys.items(), values, strict=True)]
        self._rows = np.concatenate([self._rows[:known], *parts])

    def _refuse_many_missing(self, known: int, edge: int) -> None:
        """Reject a count far above the number of existing scalars, before memory is allocated."""
        wanted = (edge - known) // SCALAR_BLOCK
        if wanted <= _MANY_BLOCKS:
            return
        found = len(self._db.keys(scalar_block_key(known), scalar_block_key(edge)))
        if found < wanted // 2:
            raise DamagedRunError(
                f"{self._db.path}: the head counts {edge} scalars, but {wanted - found} of "
                f"the {wanted} blocks that hold them are missing."
            )

    def _keys(self, known: int, edge: int, count: int) -> Iterator[tuple[str, int]]:
        """Yield the keys of the rows from `known` on, and the number of rows in each.

        Blocks are complete; each piece of the open block ends where the next one starts.
        """
        for at in range(known, edge, SCALAR_BLOCK):
            yield scalar_block_key(at), SCALAR_BLOCK
        at = max(known, edge)
        found = self._db.keys(scalar_piece_key(at), scalar_piece_key(count)) if at < count else []
        starts = [int(key[-DIGITS:]) for key in found]
        if at < count and (not starts or starts[0] > at):
            starts.insert(0, at)  # the key of the first piece is missing
        for first, last in pairwise([*starts, count]):
            yield scalar_piece_key(first), last - first

    def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read keys concurrently; unreadable ones are None."""
        try:
            return [*self._db.read_all(keys, most=MOST_BYTES)]
        except DamagedRunError:
            if len(keys) == 1:
                return [None]
        return [value for key in keys for value in self._values([key])]

    def _part(self, key: str, count: int, value: bytes | None) -> Rows:
        reason = "is missing"
        try:
            name = key if self._db.bound else None
            rows = unpacked(value, name) if value else np.empty(0, ROW)
            if len(rows) == count:
                return rows
            reason = f"contains {len(rows)} instead of {count}" if value else reason
        except (zlib.error, ValueError):
            reason = "is damaged"
        loss = f"{count} logged values (losses, KPIs) are missing: key {key!r} {reason}"
        self.damage.append(loss)
        _log.warning("comgra: %s", loss)
        lost = np.zeros(count, ROW)
        lost["step"], lost["value"] = LOST, np.nan
        return lost


def packed(rows: Rows, key: str | None) -> bytes:
    """Return rows as bytes to store under a key; None for format version 2."""
    steps = rows["step"]
    columns = [np.diff(steps, prepend=np.int64(0)), rows["value"], rows["name"], rows["type"]]
    content = zlib.compress(b"".join(_by_significance(column) for column in columns), 1)
    return content if key is None else content + _seal(content, key)


def _seal(content: bytes, key: str) -> bytes:
    return zlib.crc32(content, zlib.crc32(key.encode())).to_bytes(4, "little")


def unpacked(value: bytes, key: str | None) -> Rows:
    """Decode stored bytes to rows. Raises zlib.error or ValueError if they are damaged.

    Args:
        value: stored bytes.
        key: key of the bytes; None in format version 2.
    """
    if key is not None:
        value, seal = value[:-4], value[-4:]
        if seal != _seal(value, key):
            raise ValueError("its checksum does not match")
    decoder = zlib.decompressobj()
    data = decoder.decompress(value, SCALAR_BLOCK * ROW.itemsize + 1)  # the maximum of a key
    if not decoder.eof or decoder.unused_data:
        raise ValueError("its length is wrong")
    count, rest = divmod(len(data), ROW.itemsize)
    if rest:
        raise ValueError(f"{len(data)} bytes is not a whole number of rows")
    rows, at = np.empty(count, ROW), 0
    for name, code in _COLUMNS.items():
        dtype = np.dtype(code)
        part = np.frombuffer(data, np.uint8, count * dtype.itemsize, at)
        rows[name] = part.reshape(dtype.itemsize, count).T.copy().view(dtype)[:, 0]
        at += part.size
    rows["step"] = np.cumsum(rows["step"])
    return rows


def _by_significance(column: NDArray[np.generic]) -> bytes:
    little = np.ascontiguousarray(column, column.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()
