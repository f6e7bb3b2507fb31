"""Split the records of a commit into rows, complete blocks, and the open block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dense import Families
from .layout import RECORDS_ARRAY, RECORDS_CHUNK, SYSTEM_COLUMNS

Piece = tuple[str, int, NDArray[Any]]
"""One write: array name, first record, data [records, padded columns, ...]."""


def whole_blocks(first: int, count: int, block: int) -> tuple[int, int]:
    """Return the range of records in a commit that fill complete blocks."""
    start = -(-first // block) * block
    end = (first + count) // block * block
    return (start, end) if start < end else (first, first)


TAIL = 16
"""In a bucket, each commit also writes the rows of the open block since the last multiple of this
number again, and from a multiple on, all of them. They are then in two objects, however many
commits there were, so reading them takes few requests. Each row is written about `TAIL` times in a
block of 256 records."""


class BlockBuffer:
    """Buffers the rows in the open block until the block is full.

    Args:
        block: records per block.
        fills: the fill value of each family's padding.
        gathers: whether rows of earlier commits are written again; see `TAIL`.
    """

    def __init__(self, block: int, fills: dict[str, Any], *, gathers: bool = False) -> None:
        self._block = block
        self._fills = fills
        self._gathers = gathers
        self._pending: list[Families] = []

    def pieces(self, first: int, families: Families) -> Iterator[Piece]:
        """Yield all writes of a commit that starts at record `first`."""
        count = len(families["kpi"])
        start, end = whole_blocks(first, count, self._block)
        boundary = self._boundary(first, count)
        before = self._again(first, families) if boundary is None and start == end else []
        for name, data in families.items():
            if start > first:
                yield f"{name}/row", first, data[: start - first]
            if end < first + count:
                rows = [each[name] for each in before] + [data[end - first :]]
                at = end - sum(map(len, rows[:-1]))
                yield f"{name}/row", at, np.concatenate(rows) if before else rows[0]
            if start < end:
                yield f"{name}/blk", start, data[start - first : end - first]
            if boundary is not None:
                yield (
                    f"{name}/blk",
                    boundary - self._block,
                    self._joined(name, data, boundary, first),
                )

    def accept(self, first: int, families: Families) -> None:
        """Mark the commit as written; retain the rows in the open block and drop all others."""
        count = len(families["kpi"])
        open_start = (first + count) // self._block * self._block
        if open_start >= first:
            self._pending = []
        rest = max(0, open_start - first)
        if rest < count:
            # copies, because views of the last few rows would keep a large commit in memory
            self._pending.append({k: v[rest:].copy() if rest else v for k, v in families.items()})

    def resume(self, rows: list[Families]) -> None:
        """Restore the rows of a resumed run's open block."""
        self._pending = rows

    def _again(self, first: int, families: Families) -> list[Families]:
        """Return the rows of the open block to write again, if all have the width of the new."""
        if not self._gathers or not self._pending:
            return []
        held, new = sum(len(each["kpi"]) for each in self._pending), len(families["kpi"])
        since = held // TAIL * TAIL if held // TAIL == (held + new) // TAIL else 0
        found: list[Families] = []
        for each in reversed(self._pending):
            held -= len(each["kpi"])
            if any(each[name].shape[1] != data.shape[1] for name, data in families.items()):
                break
            skipped = max(0, since - held)
            if skipped < len(each["kpi"]):
                found.insert(0, {name: data[skipped:] for name, data in each.items()})
            if held <= since:
                break
        return found

    def _boundary(self, first: int, count: int) -> int | None:
        """Return the end of the block that was open before this commit, if the commit fills it."""
        end = -(-first // self._block) * self._block
        return end if end != first and end <= first + count else None

    def _joined(self, name: str, data: NDArray[Any], boundary: int, first: int) -> NDArray[Any]:
        parts = [families[name] for families in self._pending] + [data[: boundary - first]]
        joined = self._stacked(name, parts)
        assert len(joined) == self._block, "the open block lost rows"
        return joined

    def open_rows(self, name: str) -> NDArray[Any] | None:
        """Return the rows in the open block, [records, columns, ...]; None if it is empty."""
        parts = [families[name] for families in self._pending]
        return self._stacked(name, parts) if parts else None

    def _stacked(self, name: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
        width = max(part.shape[1] for part in parts)
        shape = (sum(map(len, parts)), width, *parts[0].shape[2:])
        joined = np.full(shape, self._fills[name], parts[0].dtype)
        at = 0
        for part in parts:
            joined[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        return joined


class RecordChunks:
    """Buffers the numeric facts of the open chunk of `records`."""

    def __init__(self) -> None:
        self._pending: list[NDArray[np.float64]] = []  # facts [k, SYSTEM_COLUMNS] of each commit
        self._written: tuple[int, NDArray[np.float64]] | None = None

    def pieces(self, first: int, kpi: NDArray[np.float64]) -> Iterator[Piece]:
        """Yield the chunks completed by this commit's rows, which start at record `first`."""
        new = kpi[:, :SYSTEM_COLUMNS]
        self._written = first, new
        edge = first // RECORDS_CHUNK * RECORDS_CHUNK
        end = (first + len(new)) // RECORDS_CHUNK * RECORDS_CHUNK
        if edge < end:
            facts = np.concatenate([*self._pending, new])
            yield RECORDS_ARRAY, edge, facts[: end - edge]

    def accept(self) -> None:
        """Mark the commit as written; retain the facts that are not yet in a complete chunk."""
        if self._written is None:
            return
        first, new = self._written
        end = (first + len(new)) // RECORDS_CHUNK * RECORDS_CHUNK
        if end >= first:
            self._pending = []
            new = new[end - first :]
        self._pending.append(new.copy())
        self._written = None

    def discard(self) -> None:
        """Discard the staged commit, which will be retried."""
        self._written = None

    def resume(self, facts: NDArray[np.float64]) -> None:
        """Restore the facts of a resumed run that are not yet in a complete chunk."""
        self._pending = [facts[:, :SYSTEM_COLUMNS].copy()]
