"""Keep the files of a run few while it is being recorded, by writing the keys of many into one.

A commit writes one data file. When `FAN` of them have come together, the writer writes the keys
whose values or index nodes are in them again, with the same bytes, and later removes the files. The
results are merged in the same way, so that there are fewer than `FAN` files of each tier, and of n
commits come about log n tiers. A result of `PART_BYTES` is not merged again.

No reader needs to know: every key has the same value before and after. A part of a merge is a
commit like any other, so a program may be killed at any moment. Files are removed only after a
search in the newest index (`index.py`) has found no reference to them, and at the next merge at the
earliest. A reader that still uses an older index reads again with the newest one (`View._read`).
Older versions of the database end with their files, so the search for an intact version goes back
to the last merge (`oldest_version`).

Nothing is merged in a bucket: requests cost more there than files, and a reader cannot show with a
lock that it still uses an old version.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from comgra_decl.errors import ComgraError, DamagedRunError, StoreError

from .commit import Commit
from .database import Database, new_context
from .index import Part, Search, question_of
from .layout import FILES_KEY, HEAD_KEY
from .location import Location
from .locking import held_alone

FAN = 64
"""Number of files of a tier that are merged into one."""

PART_BYTES = 32 << 20
"""Number of bytes after which a file is complete and is not merged again."""

_CROWD = 4
"""The writer merges even if it is pressed for time once there are this many times `FAN` commits."""

_PART_KEYS = 4096
_AT_ONCE = 512  # keys that are read together
_FULL = 99  # tier of complete files
_DATA = "d/"
_NAME = re.compile(r"[0-9a-f]{32}")
_MOST_BACK = 10  # versions to look back for a readable list: 1, 2, 4, ..., 512

_log = logging.getLogger("comgra_decl")

Write = Callable[[Callable[[Commit], None]], None]
"""Makes a commit that contains what the given function writes."""


@dataclass
class _Noted:
    """What is stored about the files of a database, as `FILES_KEY`.

    Attributes:
        tiers: tier of each file, in the order in which they were written.
        retired: files that the newest index no longer refers to, and since which version.
        oldest: oldest version whose files all exist once those are removed that were retired
            before.
    """

    tiers: dict[str, int] = field(default_factory=dict)
    retired: list[tuple[int, list[str]]] = field(default_factory=list)
    oldest: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "tiers": [*self.tiers.items()]}


class Merger:
    """Merges the files of one database. Used by its writer only, between commits."""

    def __init__(self, database: Database, *, resumed: bool = False) -> None:
        """Read nothing yet.

        Args:
            database: the database.
            resumed: whether it may have been merged before.
        """
        self._db = database
        self._noted = _Noted()
        self._commits = 0
        self._work: Iterator[bool] | None = None
        self._search: Search | None = None
        self._resumed = resumed
        self._folder = Path(database.path) / _DATA
        # without locks, readers cannot keep the files of an old version
        self._ended = not isinstance(database.place, Path) or os.name != "posix"

    @property
    def crowded(self) -> bool:
        """Whether a merge is overdue."""
        return self._commits >= _CROWD * FAN

    def committed(self) -> None:
        """Count a commit."""
        self._commits += 1

    def proceed(self, write: Write, *, wait: bool = False) -> bool:
        """Do a limited part of the work; return whether more can be done at once.

        A failure only ends the merge. If the store has failed, the next commit will report it.

        Args:
            write: see `Write`.
            wait: whether to wait for the search in the index, which takes a second or so.
        """
        if self._ended or (self._work is None and self._commits < FAN):
            return False
        if self._work is None:
            self._work = self._merge(write)
        try:
            if self._search is not None and not self._search.ended(wait=wait):
                return False
            return next(self._work) or wait
        except StopIteration:
            pass
        except (ComgraError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
            # what is damaged must stay as it is, so that an older version can be recovered
            self._ended = isinstance(error, DamagedRunError)
            _log.debug("comgra: the files of a run were not merged: %s", error)
        self._commits = 0
        self.stop()
        return False

    def stop(self) -> None:
        """End a merge. Files that it has written are merged by the next one."""
        self._work = None
        if self._search is not None:
            self._search.stop()
            self._search = None

    def end(self) -> None:
        """End, and remove the files that are no longer needed. Nothing is merged afterwards."""
        self.stop()
        self._ended = True
        with suppress(OSError):
            self._remove_retired()

    # -- one merge

    def _merge(self, write: Write) -> Iterator[bool]:
        """Merge; yield before and after each search and each commit."""
        if self._resumed:
            self._restore()
        self._remove_retired()
        self._note_new(0)
        tiers = self._noted.tiers
        counts = [list(tiers.values()).count(tier) for tier in range(_FULL)]
        full = [tier for tier, count in enumerate(counts) if count >= FAN]
        if not full:
            return
        old = {name for name, tier in tiers.items() if tier <= full[-1]}
        first = next(at for at, name in enumerate(tiers) if name in old)
        kept = {*[*tiers][:first]}  # written before, so they refer to none of `old`
        after: bytes | None = b""
        while after is not None:
            yield self._begin(after, old, kept)
            part = self._found()
            if part.keys:
                self._note_new(0)  # from commits since the last part
                write(partial(self._rewrite, part.keys))
                self._note_new(_FULL if part.size >= PART_BYTES else full[-1] + 1)
                yield True
            after = part.after
        after, since = b"", 0
        while after is not None:
            yield self._begin(after, old, kept)
            part = self._found()
            if part.keys:
                return  # they stay, and are merged next time
            after, since = part.after, part.version
            old -= part.lists  # commits add to the newest lists of old versions
        self._note_new(0)
        noted = self._noted
        tiers = {name: tier for name, tier in noted.tiers.items() if name not in old}
        after_this = _Noted(tiers, [*noted.retired, (since, sorted(old))], noted.oldest)
        write(lambda commit: commit.put_json(FILES_KEY, after_this.to_json()))
        self._noted = after_this

    def _begin(self, after: bytes, old: set[str], kept: set[str]) -> bool:
        """Begin a search from a key on; return that there is nothing to do before it ends."""
        question = question_of(
            Path(self._db.path),
            after=after,
            old={_DATA + name for name in old},
            kept={_DATA + name for name in kept},
            keys=_PART_KEYS,
            size=PART_BYTES,
        )
        self._search = Search(question)
        return False

    def _found(self) -> Part:
        """Return what the search has found."""
        search, self._search = self._search, None
        if search is None:
            raise StoreError("a merge was stopped")
        part = search.found()
        # every commit writes the head again
        keys = [key for key in part.keys if key != HEAD_KEY.encode()]
        lists = frozenset(name.removeprefix(_DATA) for name in part.lists)
        return Part(keys, part.size, part.after, part.version, lists)

    def _rewrite(self, keys: Sequence[bytes], commit: Commit) -> None:
        for start in range(0, len(keys), _AT_ONCE):
            names = [key.decode() for key in keys[start : start + _AT_ONCE]]
            for name, value in zip(names, self._db.read_all(names), strict=True):
                if not value:
                    raise DamagedRunError(f"{self._db.path}: key {name!r} is empty.")
                commit.put(name, value)

    # -- the files

    def _names(self) -> list[str]:
        return sorted(name for name in _names_in(self._folder) if _NAME.fullmatch(name))

    def _note_new(self, tier: int) -> None:
        """Note files that were not there before; large ones are complete.

        Those come last: a file refers to earlier ones, and names do not tell which are earlier.
        """
        known = {name for _, names in self._noted.retired for name in names}
        new = [name for name in self._names() if name not in known | self._noted.tiers.keys()]
        large = {name for name in new if (self._folder / name).stat().st_size >= PART_BYTES}
        self._noted.tiers |= {name: tier for name in new if name not in large}
        self._noted.tiers |= dict.fromkeys(sorted(large), _FULL)

    def _restore(self) -> None:
        """Read what an earlier program has noted; all other files count as new."""
        self._resumed = False
        noted = _read_noted(self._db)
        there = set(self._names())
        # what it has retired and not removed counts as new, too
        tiers = {name: tier for name, tier in noted.tiers.items() if name in there}
        self._noted = _Noted(tiers, oldest=_oldest(noted, there))

    def _remove_retired(self) -> None:
        if not self._noted.retired:
            return
        with held_alone(self._folder) as free:  # readers of an old version hold it
            if not free:
                return
            for since, names in self._noted.retired:
                for name in names:
                    self._remove(self._folder / name)
                self._noted.oldest = since
            self._noted.retired = []

    def _remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)


def oldest_version(run: Location, version: int) -> int:
    """Return the oldest version of a database whose files all exist, as far as is known.

    Args:
        run: the folder of the run.
        version: its newest version, which may be damaged.
    """
    if not isinstance(run, Path):
        return 1
    for back in range(-1, _MOST_BACK):
        at = version - (1 << back if back >= 0 else 0)
        if at < 1:
            break
        try:
            database = Database(run, new_context(cache_bytes=0), version=at)
            noted = _read_noted(database)
            there = {*_names_in(Path(database.path) / _DATA)}
            return max(1, _oldest(noted, there))
        except (ComgraError, OSError):
            continue  # damaged
    return 1


def _names_in(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir())


def _oldest(noted: _Noted, there: set[str]) -> int:
    """Return the oldest version whose files were not removed after the note was written."""
    gone = [since for since, names in noted.retired if not there.issuperset(names)]
    return max([noted.oldest, *gone])


def _read_noted(database: Database) -> _Noted:
    """Read what is noted about the files. Raises DamagedRunError if it cannot be read."""
    value = database.read_bytes(FILES_KEY)
    if value is None:
        return _Noted()
    found = database.parse(FILES_KEY, value)
    try:
        return _Noted(
            {str(name): int(tier) for name, tier in found["tiers"]},
            [(int(since), [str(name) for name in names]) for since, names in found["retired"]],
            int(found["oldest"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedRunError(f"{database.path}: key {FILES_KEY!r} is damaged: {error}") from error
