"""Keep the files of a run few while it is being recorded, by writing the keys of many into one.

A commit writes one data file. When `FAN` of them have come together, the writer writes the keys
whose values or index nodes are in them again, with the same bytes, and later removes the files. The
results are merged in the same way, so that there are fewer than `FAN` files of each tier, and of n
commits come about log n tiers. A result of `PART_BYTES` is not merged again.

No reader needs to know: every key has the same value before and after. A part of a merge is a
commit like any other, so a program may be killed at any moment. Files are removed only after a walk
through the newest index has found no reference to them, and at the next merge at the earliest. A
reader that still uses an older index reads again with the newest one (`View._read`). Older versions
of the database end with their files, so the search for an intact version goes back to the last
merge.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError

from .commit import Commit
from .database import Database
from .layout import FILES_KEY, HEAD_KEY
from .locking import held_alone
from .remote import base_spec

FAN = 64
"""Number of files of a tier that are merged into one."""

PART_BYTES = 32 << 20
"""Number of bytes after which a file is complete and is not merged again."""

GRACE = 3600.0
"""Seconds for which objects that are no longer needed stay in a bucket, where readers cannot show
with a lock that they still use an old version."""

_CROWD = 4
"""The writer merges even if it is pressed for time once there are this many times `FAN` commits."""

_PART_KEYS, _PART_NODES, _AT_ONCE = 4096, 512, 32
_FULL = 99  # tier of complete files
_DATA = "d/"
_NAME = re.compile(r"d/[0-9a-f]{32}")
_PLACE = re.compile(r"(d/[0-9a-f]{32}):\d+:(\d+)")

_log = logging.getLogger("comgra_decl")

Write = Callable[[Callable[[Commit], None]], None]
"""Makes a commit that contains what the given function writes."""


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the index whose keys may be in files that a merge replaces.

    Attributes:
        prefix: beginning of all its keys.
        entries: its keys and where their values are.
        end: first key that is not in it; None for the last leaf.
        touched: whether one of its keys must be written again even if all its values can stay,
            because it, or a node above it, is in a replaced file.
    """

    prefix: bytes
    entries: Sequence[Any]
    end: bytes | None
    touched: bool


class Merger:
    """Merges the files of one database. Used by its writer only, between commits."""

    def __init__(self, database: Database, *, resumed: bool = False) -> None:
        """Send no request yet.

        Args:
            database: the database.
            resumed: whether it may have been merged before.
        """
        self._db = database
        self._base: ts.KvStore | None = None
        self._files: dict[str, int] = {}  # tier by name, in the order in which they were written
        self._retired: list[tuple[float, list[str]]] = []  # no longer needed, and since when
        self._commits = 0
        self._work: Iterator[None] | None = None
        self._resumed = resumed
        self._ended = False

    @property
    def crowded(self) -> bool:
        """Whether a merge is overdue."""
        return self._commits >= _CROWD * FAN

    def committed(self) -> None:
        """Count a commit."""
        self._commits += 1

    def proceed(self, write: Write) -> bool:
        """Do a limited part of the work; return whether more is to be done now.

        A failure only ends the merge. If the store has failed, the next commit will report it.

        Args:
            write: see `Write`.
        """
        if self._ended or (self._work is None and self._commits < FAN):
            return False
        if self._work is None:
            self._commits, self._work = 0, self._merge(write)
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        except ComgraError as error:
            self._work = None
            # what is damaged must stay as it is, so that an older version can be recovered
            self._ended = isinstance(error, DamagedRunError)
            _log.debug("comgra: the files of a run were not merged: %s", error)
        return self._work is not None

    # -- one merge

    def _merge(self, write: Write) -> Iterator[None]:
        if self._resumed:
            self._restore()
        self._remove_retired()
        self._note_new(0)
        counts = [list(self._files.values()).count(tier) for tier in range(_FULL)]
        full = [tier for tier, count in enumerate(counts) if count >= FAN]
        if not full:
            return
        old = {name for name, tier in self._files.items() if tier <= full[-1]}
        first = next(at for at, name in enumerate(self._files) if name in old)
        kept = frozenset([*self._files][:first])  # written before, so they refer to none of `old`
        after: bytes | None = b""
        while after is not None:
            keys, size, after = self._found(after, old, kept)
            if keys:
                self._note_new(0)  # from commits since the last part
                write(partial(self._rewrite, keys))
                self._note_new(_FULL if size >= PART_BYTES else full[-1] + 1)
            yield
        after = b""
        while after is not None:
            keys, _, after = self._found(after, old, kept)
            if keys:
                return  # they stay, and are merged next time
            yield
        self._note_new(0)
        # commits add to the newest lists of old versions, wherever they are
        lists = _Walk(self._store, self._db).manifest()["version_tree_nodes"]
        old -= {_file(node["location"]) for node in lists}
        files = {name: tier for name, tier in self._files.items() if name not in old}
        write(lambda commit: commit.put_json(FILES_KEY, [*files.items()]))
        self._files = files
        self._retired.append((time.time(), sorted(old)))

    def _found(
        self, after: bytes, old: Collection[str], kept: Collection[str]
    ) -> tuple[list[bytes], int, bytes | None]:
        """Return keys to write again, their size, and from which key on to continue."""
        keys: list[bytes] = []
        size = 0
        walk = _Walk(self._store, self._db, after=after, old=old, kept=kept)
        for visited, leaf in enumerate(walk.leaves(), 1):
            here = []
            for entry in leaf.entries:
                place = _place(entry.get("indirect_value", ""))
                if place is not None and place[0] in old:
                    here.append(entry["key"])
                    size += place[1]
            if leaf.touched and not here:
                here = [entry["key"] for entry in leaf.entries][:1]
            keys += [key for key in (leaf.prefix + key for key in here) if key != HEAD_KEY.encode()]
            if size >= PART_BYTES or len(keys) >= _PART_KEYS or visited >= _PART_NODES:
                return keys, size, leaf.end
        return keys, size, None

    def _rewrite(self, keys: Sequence[bytes], commit: Commit) -> None:
        for start in range(0, len(keys), _PART_NODES):
            names = [key.decode() for key in keys[start : start + _PART_NODES]]
            for name, value in zip(names, self._db.read_all(names), strict=True):
                if not value:
                    raise DamagedRunError(f"{self._db.path}: key {name!r} is empty.")
                commit.put(name, value)

    # -- the files

    @property
    def _store(self) -> ts.KvStore:
        if self._base is None:
            with self._db.reading("the list of files"):
                opened = ts.KvStore.open(base_spec(self._db.place), context=self._db.context)
                self._base = opened.result()
        return self._base

    def _names(self) -> list[str]:
        with self._db.reading("the list of files"):
            found = self._store.list(ts.KvStore.KeyRange(_DATA, "d0")).result()
        return sorted(name for name in map(bytes.decode, found) if _NAME.fullmatch(name))

    def _note_new(self, tier: int) -> None:
        """Note files that were not there before."""
        retired = {name for _, names in self._retired for name in names}
        for name in self._names():
            if name not in retired:
                self._files.setdefault(name, tier)

    def _restore(self) -> None:
        """Read the tiers that an earlier program has noted; all other files count as new."""
        self._resumed = False
        value = self._db.read_bytes(FILES_KEY)
        if value is None:
            return
        known = self._db.parse(FILES_KEY, value)
        there = set(self._names())
        self._files = {str(name): int(tier) for name, tier in known if name in there}

    def _remove_retired(self) -> None:
        place = self._db.place
        if not isinstance(place, Path):
            due = [each for each in self._retired if time.time() - each[0] >= GRACE]
            self._remove(due)
            return
        with held_alone(place / "d") as free:  # readers of an old version hold it
            if free:
                self._remove(self._retired)

    def _remove(self, retired: Sequence[tuple[float, list[str]]]) -> None:
        with self._db.writing("the removal of merged files"):
            for each in [*retired]:
                for removal in [self._store.write(name, None) for name in each[1]]:
                    removal.result()
                self._retired.remove(each)


class _Walk:
    """Reads the leaves of the newest index with keys from `after` on, in order.

    Args:
        store: the files of the database.
        database: the database.
        after: the first key.
        old: files that are to be replaced.
        kept: files that refer to none of them. What is below nodes in them is left out.
    """

    def __init__(
        self,
        store: ts.KvStore,
        database: Database,
        *,
        after: bytes = b"",
        old: Collection[str] = (),
        kept: Collection[str] = (),
    ) -> None:
        self._store = store
        self._db = database
        self._after = after
        self._old = old
        self._kept = kept

    def manifest(self) -> Any:
        """Return the manifest."""
        return self._ended(self._begun(None))

    def leaves(self) -> Iterator[_Leaf]:
        """Yield the leaves."""
        root = self.manifest()["versions"][-1].get("root", {}).get("location")
        if root is not None:
            content = self._ended(self._begun(root))
            yield from self._below(content, b"", None, _file(root) in self._old)

    def _below(
        self, content: Any, prefix: bytes, end: bytes | None, touched: bool
    ) -> Iterator[_Leaf]:
        """Yield the leaves below a node, or the node itself; the arguments are as in `_Leaf`."""
        entries = content["entries"]
        if not content["height"]:
            yield _Leaf(prefix, entries, end, touched)
            return
        ends = [prefix + entry["key"] for entry in entries[1:]] + [end]
        wanted = []
        for at, (entry, until) in enumerate(zip(entries, ends, strict=True)):
            first = touched and not at
            if (until is None or until > self._after) and (first or not self._is_kept(entry)):
                wanted.append((entry, until, first))
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            # together, because each of them is a request in a bucket
            begun = [self._begun(entry["location"]) for entry, _, _ in part]
            for read, (entry, until, first) in zip(begun, part, strict=True):
                inner = prefix + entry["subtree_common_prefix"]
                again = first or _file(entry["location"]) in self._old
                yield from self._below(self._ended(read), inner, until, again)

    def _is_kept(self, entry: Any) -> bool:
        return _file(entry["location"]) in self._kept

    def _begun(self, place: str | None) -> Any:
        """Begin to read a node of the index; None: the manifest."""
        return ts.ocdbt.dump(self._store, place, context=self._db.context)

    def _ended(self, read: Any) -> Any:
        with self._db.reading("the index"):
            return read.result()


def _place(location: str) -> tuple[str, int] | None:
    """Return the file and the size of a value; None if it is stored in the index itself."""
    found = _PLACE.search(location)
    return None if found is None else (found[1], int(found[2]))


def _file(location: str) -> str:
    found = _PLACE.search(location)
    return "" if found is None else found[1]
