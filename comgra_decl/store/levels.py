"""The level of detail: extremes of every 256 records, so that overviews of long runs read few keys.

A span is 256 records. For each span, slot and statistic, the level holds the lowest and the highest
value and the records that have them, separately for each kind of record (mode, type, tags). The
writer adds a span when its blocks are complete, and writes 64 spans together, as one key per
statistic and 64 slots.

Levels are derived data. An entry states the records that it covers and a checksum of their facts.
An entry that is missing, damaged or does not fit is ignored, and the records themselves are read
instead, with the same result.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES

from .commit import Commit
from .database import Database
from .layout import RecordColumn, level_key, round_up
from .meta import RunMeta

if TYPE_CHECKING:
    from .view import View

SPAN = 256
"""Records per entry: the longest block, so that an entry never covers a part of a block."""

LONG = 1 << 16
"""Records from which on overviews use levels. Shorter runs are at most 256 blocks."""

_TOGETHER = 64  # spans per key
_GROUP = SPAN * _TOGETHER
_TILE = 64  # slots per key
_MOST_KINDS = 4  # kinds of records in a span; with more, the span gets no entry
_AT_ONCE = 64 << 20  # bytes of a transaction of a compaction, which creates one file
_MOST = 64 << 20  # maximum size of a key, in bytes
_MAGIC = b"CLV1"
_KIND = [RecordColumn.MODE, RecordColumn.TYPE, RecordColumn.TAGS]
_FACTS = [RecordColumn.STEP, *_KIND]
_ENTRY = np.dtype(
    [("first", "<i8"), ("count", "<u2"), ("facts", "<u4"), ("kind", "<f8", (len(_KIND),))]
)

Floats = NDArray[np.float32]
Kind = tuple[float, ...]


def level_columns(meta: RunMeta) -> int:
    """Return the number of columns that have levels: those of statistics, which come first."""
    return len(meta.statistics) * len(AGGREGATES)


@dataclass(frozen=True)
class Extremes:
    """The lowest and the highest value of some slots in each span of records.

    NaN is not a value; infinities are. Of equal values, the first one counts.

    Attributes:
        first: first record of the first span, a multiple of `SPAN`.
        low: lowest values, float32 [spans, slots]; NaN where there are none.
        high: highest values, likewise.
        low_at: numbers of the records with the lowest values, int64 [spans, slots]; -1 for none.
        high_at: numbers of the records with the highest values, likewise.
    """

    first: int
    low: Floats
    high: Floats
    low_at: NDArray[np.int64]
    high_at: NDArray[np.int64]

    @classmethod
    def empty(cls, first: int, spans: int, slots: int) -> Extremes:
        """Return extremes without any values, to be filled."""
        nan, none = np.full((2, spans, slots), np.nan, np.float32), np.full((2, spans, slots), -1)
        return cls(first, nan[0], nan[1], none[0], none[1])

    def merge(self, spans: NDArray[np.int64], other: Sequence[NDArray[Any]]) -> None:
        """Let further values compete, of other records of the same spans.

        Args:
            spans: numbers of the spans [k].
            other: lowest and highest values [k, slots], and their records; fewer slots than there
                are belong to the first ones.
        """
        low, high, low_at, high_at = other
        at = slice(0, low.shape[1])
        for known, known_at, new, new_at, sign in (
            (self.low, self.low_at, low, low_at, np.float32(1)),
            (self.high, self.high_at, high, high_at, np.float32(-1)),
        ):
            old, old_at = known[spans, at], known_at[spans, at]
            earlier = (new == old) & (new_at < old_at)
            better = (sign * new < sign * old) | earlier | (np.isnan(old) & ~np.isnan(new))
            known[spans, at] = np.where(better, new, old)
            known_at[spans, at] = np.where(better, new_at, old_at)

    def put(self, spans: NDArray[np.int64], other: Extremes) -> None:
        """Replace the extremes of spans."""
        self.low[spans], self.high[spans] = other.low, other.high
        self.low_at[spans], self.high_at[spans] = other.low_at, other.high_at


def reduced(values: NDArray[Any], chosen: NDArray[np.bool_], first: int) -> Extremes:
    """Return the extremes of values, computed from the values themselves.

    Args:
        values: values of consecutive records [k, slots].
        chosen: which of these records count [k].
        first: number of the first record, a multiple of `SPAN`.
    """
    spans = -(-len(values) // SPAN)
    result = Extremes.empty(first, spans, values.shape[1])
    for number in range(spans):
        part = slice(number * SPAN, (number + 1) * SPAN)
        records = np.flatnonzero(chosen[part])
        if len(records):
            low, high, low_at, high_at = _of(values[part][records])
            for known, found in ((result.low, low), (result.high, high)):
                known[number] = found
            for known_at, at in ((result.low_at, low_at), (result.high_at, high_at)):
                there = first + part.start + records[at]
                known_at[number] = np.where(np.isnan(result.low[number]), -1, there)
    return result


def _of(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return lowest and highest values along the first axis, and where they first occur."""
    low_at = (values == np.fmin.reduce(values, axis=0)).argmax(0)
    high_at = (values == np.fmax.reduce(values, axis=0)).argmax(0)
    low, high = (np.take_along_axis(values, at[None], axis=0)[0] for at in (low_at, high_at))
    # where there is no value, both positions are 0, and the value there is NaN
    return low, high, low_at, high_at


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """The extremes of one kind of record in a span, or in the blocks of it that are complete."""

    first: int
    count: int
    facts: int
    kind: Kind
    low: Floats  # [statistics, slots], as the other three
    high: Floats
    low_at: NDArray[np.uint8]  # within the span
    high_at: NDArray[np.uint8]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the order in which they are stored."""
        return self.low, self.high, self.low_at, self.high_at


Span = tuple[_Entry, ...]
"""The entries of one span, one for each kind of record; never empty."""


class LevelTable:
    """Writer side: collects the spans of the open group. A stage of `Contents`.

    Args:
        columns: number of columns of statistics, which come first.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._known: tuple[Span, ...] = ()  # by span; the last one may be open
        self._staged: tuple[Span, ...] | None = None

    def add(self, commit: Commit, first: int, values: Floats, facts: NDArray[np.float64]) -> None:
        """Add complete blocks, and write the group that they complete.

        Args:
            commit: commit that writes the blocks.
            first: number of the first record.
            values: statistics of all slots [records, slots, columns].
            facts: numeric facts of these records [records, SYSTEM_COLUMNS or more].
        """
        groups = self._known if self._staged is None else self._staged
        for at, part in _by_span(first, len(values)):
            groups = self._with(groups, at, values[part], facts[part])
            if (at + part.stop - part.start) % _GROUP == 0:
                self._write(commit, groups)
                groups = ()
        self._staged = groups

    def finish(
        self, commit: Commit, first: int, values: Floats, facts: NDArray[np.float64]
    ) -> None:
        """Write the open group with the records of the open block, if the run is long."""
        if first + len(facts) < LONG:
            return
        groups = self._known
        for at, part in _by_span(first, len(values)):
            groups = self._with(groups, at, values[part], facts[part])
        self._write(commit, groups)

    def resume(self, entries: Sequence[Span]) -> None:
        """Restore the spans of the open group."""
        self._known = tuple(entries)

    def accept(self) -> None:
        """Mark the staged spans as written."""
        if self._staged is not None:
            self._known, self._staged = self._staged, None

    def discard(self) -> None:
        """Discard the staged spans."""
        self._staged = None

    def _with(
        self,
        groups: tuple[Span, ...],
        first: int,
        values: Floats,
        facts: NDArray[np.float64],
    ) -> tuple[Span, ...]:
        """Return the spans with the records of one more block, or part of a block."""
        start = first // SPAN * SPAN
        new = _entries(first, values[:, :, : self._columns], facts)
        if first == start:
            return (*groups, new)
        if not groups or groups[-1][0].first + groups[-1][0].count != first:
            return groups  # its earlier records are not known, so the span gets no entry
        return (*groups[:-1], _joined(groups[-1], new))

    def _write(self, commit: Commit, groups: Sequence[Span]) -> None:
        entries = [entry for span in groups for entry in span if len(span) <= _MOST_KINDS]
        if not entries:
            return
        first = entries[0].first // _GROUP * _GROUP
        width = max(entry.low.shape[1] for entry in entries)
        rows = np.array([(e.first, e.count, e.facts, e.kind) for e in entries], _ENTRY)
        for slot in range(0, width, _TILE):
            part = slice(slot, slot + _TILE)
            stacks = [
                np.stack([_padded(array[:, part], min(_TILE, width - slot)) for array in arrays])
                for arrays in zip(*(entry.arrays() for entry in entries), strict=True)
            ]
            for column in range(self._columns):
                key = level_key(first, column, slot // _TILE)
                commit.put(key, _packed(key, rows, [stack[:, column] for stack in stacks]))


def _by_span(first: int, count: int) -> Iterator[tuple[int, slice]]:
    """Yield the first record of each piece that lies within one span, and the piece."""
    at = first
    while at < first + count:
        end = min(round_up(at + 1, SPAN), first + count)
        yield at, slice(at - first, end - first)
        at = end


def _entries(first: int, values: Floats, facts: NDArray[np.float64]) -> Span:
    """Return the entries of consecutive records within one span, one for each kind of record."""
    kinds, which = np.unique(facts[:, _KIND], axis=0, return_inverse=True)
    which = which.reshape(-1)
    digest = digest_of(facts, first % SPAN)
    table = np.moveaxis(values, 2, 1)  # [records, statistics, slots]
    found = []
    # one more than is written tells that there are too many; all of them could fill the memory
    for number, kind in enumerate(kinds.tolist()[: _MOST_KINDS + 1]):
        records = np.flatnonzero(which == number)
        low, high, *places = _of(table if len(kinds) == 1 else table[records])
        low_at, high_at = ((first % SPAN + records[at]).astype(np.uint8) for at in places)
        common = (first // SPAN * SPAN, len(values), digest, tuple(kind))
        found.append(_Entry(*common, low, high, low_at, high_at))
    return tuple(found)


def _joined(before: Span, after: Span) -> Span:
    """Return the entries of two consecutive parts of a span."""
    later = {entry.kind: entry for entry in after}
    count = before[0].count + after[0].count
    facts = (before[0].facts + after[0].facts) % (1 << 32)
    width = max(entry.low.shape[1] for entry in (*before, *after))
    found = {}
    for entry in before:
        arrays = [_padded(array, width) for array in entry.arrays()]
        other = later.pop(entry.kind, None)
        if other is not None:
            low, high, low_at, high_at = arrays
            low2, high2, low_at2, high_at2 = (_padded(each, width) for each in other.arrays())
            lower = (low2 < low) | np.isnan(low)
            higher = (high2 > high) | np.isnan(high)
            arrays = [
                np.where(lower, low2, low),
                np.where(higher, high2, high),
                np.where(lower, low_at2, low_at),
                np.where(higher, high_at2, high_at),
            ]
        found[entry.kind] = arrays
    for entry in later.values():
        found[entry.kind] = [_padded(array, width) for array in entry.arrays()]
    first = before[0].first
    kept = islice(found.items(), _MOST_KINDS + 1)
    return tuple(_Entry(first, count, facts, kind, *arrays) for kind, arrays in kept)


def _padded(array: NDArray[Any], width: int) -> NDArray[Any]:
    """Return an array [statistics, slots] with `width` slots: NaN, or position 0, for the rest."""
    if array.shape[1] == width:
        return array
    fill = np.nan if array.dtype.kind == "f" else 0
    rest = np.full((array.shape[0], width - array.shape[1]), fill, array.dtype)
    return np.concatenate([array, rest], axis=1)


def digest_of(facts: NDArray[np.float64], offset: int = 0) -> int:
    """Return a checksum of the facts of records within a span: step, mode, type and tags.

    It is the sum of the checksums of 32 records each (the shortest block), so that those of the
    blocks of a span add up to that of the span.

    Args:
        facts: the facts [records, SYSTEM_COLUMNS or more].
        offset: position of the first record in its span, a multiple of 32.
    """
    table = np.ascontiguousarray(facts[:, _FACTS])
    parts = range(0, len(table), 32)
    return sum(zlib.crc32(table[at : at + 32].data, offset + at) for at in parts) % (1 << 32)


def write_levels(view: View, target: Database) -> None:
    """Write the levels of a long run anew, from its records.

    Args:
        view: the run.
        target: where to write them.
    """
    if view.n < LONG:
        return
    columns = level_columns(view.meta)
    group = 10 * _TOGETHER * columns * round_up(len(view.slots), _TILE)  # bytes
    together = _GROUP * max(1, _AT_ONCE // group)
    table, commit = LevelTable(columns), Commit(target)
    for at in range(0, view.n, SPAN):
        last = min(at + SPAN, view.n)
        values, facts = view.rows("agg", at, last), view.records[at:last]
        if last - at == SPAN:
            table.add(commit, at, values, facts)
            table.accept()
        if last == view.n:
            rest = slice(0 if last - at < SPAN else SPAN, None)
            table.finish(commit, at + rest.start, values[rest], facts[rest])
        if last == view.n or last % together == 0:
            with target.writing("the levels of detail"):
                commit.finish()
            commit = Commit(target)


# -- the bytes of a key ----------------------------------------------------------------------------


def _packed(key: str, rows: NDArray[np.void], arrays: Sequence[NDArray[Any]]) -> bytes:
    """Encode the entries of a key: counts, entries, four arrays [entries, slots], a checksum."""
    head = _MAGIC + struct.pack("<II", len(rows), arrays[0].shape[1])
    types = ("<f4", "<f4", "u1", "u1")
    parts = [array.astype(kind).tobytes() for array, kind in zip(arrays, types, strict=True)]
    content = b"".join([head, rows.tobytes(), *parts])
    return content + struct.pack("<I", zlib.crc32(content, zlib.crc32(key.encode())))


def _unpacked(key: str, value: bytes) -> tuple[NDArray[np.void], list[NDArray[Any]]] | None:
    """Decode bytes from `_packed`; None if they are damaged."""
    content, seal = value[:-4], value[-4:]
    if struct.pack("<I", zlib.crc32(content, zlib.crc32(key.encode()))) != seal:
        return None
    if not content.startswith(_MAGIC) or len(content) < 12:
        return None
    count, slots = struct.unpack_from("<II", content, 4)
    if len(content) != 12 + count * (_ENTRY.itemsize + 10 * slots) or slots > _TILE:
        return None
    rows = np.frombuffer(content, _ENTRY, count, 12)
    arrays, at = [], 12 + rows.nbytes
    for kind in ("<f4", "<f4", "u1", "u1"):
        array = np.frombuffer(content, kind, count * slots, at).reshape(count, slots)
        arrays.append(array)
        at += array.nbytes
    return rows, arrays


# -- reading ---------------------------------------------------------------------------------------


class LevelReader:
    """Reader side: the levels that fit the facts of the records of a view. Thread-safe."""

    def __init__(self, database: Database, facts: NDArray[np.float64]) -> None:
        self._db = database
        self._facts = facts

    @cached_property
    def _digests(self) -> NDArray[np.int64]:
        """The checksum of each span's facts."""
        starts = range(0, len(self._facts), SPAN)
        return np.array([digest_of(self._facts[at : at + SPAN]) for at in starts], np.int64)

    @cached_property
    def _kinds(self) -> tuple[list[Kind], NDArray[np.int64]]:
        """All kinds of records, and the kind of each record."""
        table = self._facts[:, _KIND]
        codes = (table + 1).astype(np.int64) @ np.array([1 << 42, 1 << 21, 1])
        _, first, which = np.unique(codes, return_index=True, return_inverse=True)
        return [tuple(row) for row in table[first].tolist()], which

    def extremes(
        self,
        column: int,
        slots: slice,
        *,
        chosen: NDArray[np.bool_],
        within: slice,
        read: Callable[[slice, slice], NDArray[Any]],
    ) -> Extremes:
        """Return the extremes of the spans that overlap a range of records.

        Args:
            column: the statistic.
            slots: the slots.
            chosen: which records count [n].
            within: the range of records.
            read: reads the statistic [records, slots] of some records and slots, where there is no
                level.
        """
        first, last = within.start // SPAN * SPAN, within.stop
        starts = range(first // _GROUP * _GROUP, last, _GROUP)
        tiles = range(slots.start // _TILE, -(-slots.stop // _TILE))
        keys = [level_key(start, column, tile) for tile in tiles for start in starts]
        values = self._db.read_derived(keys, most=_MOST)
        counts = self._counts(first, last, chosen)
        found = []
        for number, tile in enumerate(tiles):
            own = slice(number * len(starts), (number + 1) * len(starts))
            mine = slice(max(slots.start, tile * _TILE), min(slots.stop, (tile + 1) * _TILE))
            out = Extremes.empty(first, len(counts[0]), mine.stop - mine.start)
            done = np.zeros(len(out.low), np.int64)
            for key, value in zip(keys[own], values[own], strict=True):
                entries = None if value is None else _unpacked(key, value)
                if entries is not None:
                    self._fill(out, done, entries, counts[1], slot=mine.start - tile * _TILE)
            wrong = np.flatnonzero(done != counts[0])
            for stretch in np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1):
                for at in range(0, len(stretch), _TOGETHER):
                    part = stretch[at : at + _TOGETHER]
                    start = first + int(part[0]) * SPAN
                    records = slice(start, min(len(chosen), first + (int(part[-1]) + 1) * SPAN))
                    out.put(part, reduced(read(records, mine), chosen[records], start))
            found.append(out)
        arrays = [
            np.concatenate([getattr(out, name) for out in found], axis=1)
            for name in ("low", "high", "low_at", "high_at")
        ]
        return Extremes(first, *arrays)

    def _fill(
        self,
        out: Extremes,
        done: NDArray[np.int64],
        entries: tuple[NDArray[np.void], list[NDArray[Any]]],
        counts: Mapping[Kind, NDArray[np.int64]],
        *,
        slot: int,
    ) -> None:
        """Fill in the entries of a key that fit, and count the records that they cover.

        Args:
            out: the extremes.
            done: number of records covered so far [spans].
            entries: what the key contains.
            counts: records to cover, see `_counts`.
            slot: the first slot of `out`, within the key.
        """
        rows, arrays = entries
        width = min(out.low.shape[1], arrays[0].shape[1] - slot)
        fits = self._fits(rows)
        for positions in arrays[2:]:
            fits &= (positions < rows["count"][:, None]).all(axis=1)
        for kind in {tuple(row) for row in rows["kind"].tolist()} & counts.keys():
            mine = np.flatnonzero((rows["kind"] == kind).all(1) & fits)
            span = (rows["first"][mine] - out.first) // SPAN
            inside = (span >= 0) & (span < len(done))
            mine, span = mine[inside], span[inside]
            mine, span = mine[counts[kind][span] > 0], span[counts[kind][span] > 0]
            if width > 0:
                low, high, *places = (array[mine, slot : slot + width] for array in arrays)
                first = rows["first"][mine][:, None]
                low_at, high_at = (first + at.astype(np.int64) for at in places)
                out.merge(span, (low, high, low_at, high_at))
            np.add.at(done, span, counts[kind][span])

    def _counts(
        self, first: int, last: int, chosen: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], dict[Kind, NDArray[np.int64]]]:
        """Return how many records of each span count, and how many of each kind.

        A kind of which only some records of a span count is 0 there, since the level mixes them.
        """
        last = min(round_up(last, SPAN), len(chosen))
        kinds, which = self._kinds
        where = np.arange(last - first) // SPAN * len(kinds) + which[first:last]
        spans = -(-(last - first) // SPAN)
        size = spans * len(kinds)
        every = np.bincount(where, minlength=size).reshape(spans, -1)
        mine = np.bincount(where[chosen[first:last]], minlength=size).reshape(spans, -1)
        whole = np.where(every == mine, mine, 0)
        return mine.sum(1), {kind: whole[:, number] for number, kind in enumerate(kinds)}

    def _fits(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Whether each entry covers all records of its span, with the facts that they have."""
        n, first = len(self._facts), rows["first"]
        known = (first % SPAN == 0) & (first < n) & (first >= 0)
        span = np.where(known, first // SPAN, 0)
        counts = np.minimum(SPAN, n - span * SPAN)
        same = (rows["count"] == counts) & (rows["facts"] == self._digests[span])
        fits: NDArray[np.bool_] = known & same
        return fits

    def restored(self, columns: int, width: int) -> list[Span]:
        """Return the complete spans of the open group, which a resumed run goes on with.

        Empty if one of the keys is missing or damaged: these spans then stay without entries until
        the run is compacted.
        """
        start = len(self._facts) // _GROUP * _GROUP
        tiles = range(-(-width // _TILE))
        keys = [level_key(start, column, tile) for column in range(columns) for tile in tiles]
        values = self._db.read_derived(keys, most=_MOST)
        pairs = zip(keys, values, strict=True)
        found = [None if value is None else _unpacked(key, value) for key, value in pairs]
        known = [each for each in found if each is not None]
        if len(known) < len(keys) or len({each[0].tobytes() for each in known}) != 1:
            return []
        rows, spans = known[0][0], dict[int, list[_Entry]]()
        stacks = [
            np.stack(
                [
                    np.concatenate([arrays[i] for _, arrays in known[at : at + len(tiles)]], 1)
                    for at in range(0, len(known), len(tiles))
                ],
                axis=1,
            )
            for i in range(4)
        ]  # [entries, statistics, slots]
        for number in np.flatnonzero(self._fits(rows) & (rows["count"] == SPAN)).tolist():
            first, count, facts, kind = rows[number].tolist()
            low, high, low_at, high_at = (stack[number] for stack in stacks)
            entry = _Entry(first, count, facts, tuple(kind.tolist()), low, high, low_at, high_at)
            spans.setdefault(first, []).append(entry)
        return [tuple(spans[first]) for first in sorted(spans)]
