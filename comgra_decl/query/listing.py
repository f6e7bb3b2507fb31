"""Find and list the runs below a folder, whatever their state.

Nothing here needs pandas, because a run to resume is found in this way, too.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comgra_decl.errors import (
    AccessError,
    ComgraError,
    DamagedRunError,
    FormatError,
    RunNotFoundError,
    StoreError,
)
from comgra_decl.store import Reader
from comgra_decl.store.database import database_exists
from comgra_decl.store.last_seen import FILE as LAST_SEEN
from comgra_decl.store.last_seen import is_begun
from comgra_decl.store.layout import DATABASE
from comgra_decl.store.location import Location, Remote, Where, location
from comgra_decl.store.remote import Objects, databases_among

from .index import SUMMARY, Index, Line
from .ranks.heartbeats import heartbeats, stopped_text
from .ranks.reader import RANKS, JoinedReader, is_rank, open_reader, rank_paths

_log = logging.getLogger("comgra_decl")

_ALWAYS = 3  # levels that are always searched, whatever their size: root/group/sweep/job
_MOST = 200_000
"""Number of file and folder names after which no deeper level is searched. Listing them takes about
a second."""

_AT_ONCE = 16
"""Maximum number of runs in a bucket that are opened concurrently."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run in a list.

    `path` is its folder, or a `Remote` for a run in a bucket. `state` is "waiting", "live",
    "finished", "failed" or "stopped". For a run that cannot be read, it is "damaged" or, if the run
    has a newer format or belongs to another user, "unreadable", and `error` gives the reason.
    `records` and `last_step` (of training; None if there is none yet) are current at the time of
    listing; `started` is in unix seconds.
    """

    path: Location
    group: str
    name: str
    state: str
    records: int
    last_step: int | None
    started: float | None
    error: str | None


def list_runs(root: Where) -> list[RunSummary]:
    """List the runs at or below a folder or a location in a bucket, oldest first.

    If a run cannot be read, it is listed with the reason. If the folder does not exist, the list is
    empty. In a bucket, all names below the location are listed, with one request per thousand
    names. Runs that have ended are opened once: an index in the folder keeps what was read.

    Raises:
        StoreError: the bucket cannot be reached.
    """
    return listed(Index(location(root)))


def listed(index: Index) -> list[RunSummary]:
    """List the runs below the place of an index, as `list_runs` does, and keep it up to date."""
    place = index.place
    index.load()
    index.creating.clear()
    paths = list(run_folders(place, index))
    if isinstance(place, Remote):  # each run takes several consecutive requests
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda path: _summary(path, index), paths))
    else:
        found = [_summary(path, index) for path in paths]
    there = [summary for summary in found if summary is not None]
    index.keep(below(place, summary.path) for summary in there)
    index.save()
    return sorted(there, key=lambda run: (run.started or 0.0, str(run.path)))


def below(place: Location, path: Location) -> str:
    """Return the path of a run below a place, by which an index names it."""
    if isinstance(place, Remote):
        assert isinstance(path, Remote)
        return path.relative_to(place).as_posix()
    assert isinstance(path, Path)
    return path.relative_to(place).as_posix()


def _summary(path: Location, index: Index) -> RunSummary | None:
    name = below(index.place, path)
    line = index.known(name)
    if line is not None:
        where = path.absolute()
        return RunSummary(path, where.parent.name, where.name, **line.summary)
    index.drop(name)
    try:
        before = index.identity(name, ranks := _own_folders(path))
        reader = open_reader(path)
        head = reader.head
        found = RunSummary(
            path=path,
            group=path.absolute().parent.name,
            name=path.absolute().name,
            state=reader.state,
            records=int(head["n"]),
            last_step=head["step"],
            started=reader.meta.started,
            error=head.get("error") or _stopped(reader),
        )
        if before is not None and path != index.place and _is_closed(reader):
            index.put(name, Line(before, ranks, facts_of(found)))
        return found
    except RunNotFoundError as error:
        if is_run(path):  # otherwise, it has just been deleted
            index.creating.append(str(error))
        return None
    except StoreError:  # the bucket cannot be reached, so the state of its runs is unknown
        raise
    except PermissionError as error:
        why = str(error) if isinstance(error, AccessError) else f"permission denied: {error}"
        return _broken(path, "unreadable", why)
    except ComgraError as error:
        state = "unreadable" if isinstance(error, FormatError) else "damaged"
        return _broken(path, state, str(error))
    except (KeyError, TypeError, ValueError, OSError) as error:
        return _broken(path, "damaged", f"{type(error).__name__}: {error}")


def facts_of(summary: RunSummary) -> dict[str, Any]:
    """Return what an index keeps of a summary: all but the location."""
    return {field: getattr(summary, field) for field in SUMMARY}


def _own_folders(path: Location) -> tuple[int, ...]:
    """Return the ranks of a run that have folders of their own."""
    folder = path / RANKS
    if isinstance(folder, Remote) or not folder.is_dir():
        return ()
    return tuple(sorted(int(each.name) for each in folder.iterdir() if is_rank(each.name)))


def _is_closed(reader: Reader | JoinedReader) -> bool:
    """Whether a run has ended in all of its processes, so that only a resumption changes it."""
    if isinstance(reader, JoinedReader):
        return not reader.missing and all(map(_is_closed, reader.readers.values()))
    return bool(reader.head["closed"])


def _stopped(reader: Reader | JoinedReader) -> str | None:
    """Return which rank stopped first, if there are several."""
    return stopped_text(heartbeats(reader)) if isinstance(reader, JoinedReader) else None


def _broken(path: Location, state: str, reason: str) -> RunSummary:
    where = path.absolute()
    started: float | None = None
    if not isinstance(where, Remote):
        with suppress(OSError):
            started = where.stat().st_mtime
    return RunSummary(path, where.parent.name, where.name, state, 0, None, started, reason)


def run_folders(root: Location, index: Index | None = None) -> Iterator[Location]:
    """Yield the run folders at or below `root`, at any depth, upper levels first.

    Skips the contents of run folders, hidden folders, and links. A folder that this user may not
    read counts as a run if it is next to one. A bucket has no folders, so all names below `root`
    are listed there. If a tree is too large to be searched completely, a warning is logged once.

    Args:
        root: where to search.
        index: an index of `root`; the folders of runs that it knows are not read.
    """
    if isinstance(root, Remote):
        yield from _run_places(root, index)
    else:
        yield from Search(root, index)


class Search:
    """Searches a folder and those below it for runs, one level at a time.

    Attributes:
        cut: a message with the limit and a remedy if the search was incomplete; otherwise "".
    """

    def __init__(self, root: Path, index: Index | None = None) -> None:
        self._root = root
        self._index = index
        self._names = 0
        self.cut = ""

    def __iter__(self) -> Iterator[Path]:
        """Yield the folders of runs."""
        level, depth = [self._root], 0
        denied: list[Path] = []
        groups: set[Path] = set()
        while level:
            below: list[Path] = []
            for folder in level:
                if depth > _ALWAYS and self._names > _MOST:
                    self._end(depth - 1)
                    return
                names, inner = 0, None
                if not self._is_known(folder):
                    try:
                        names, inner = _content(folder)
                    except PermissionError:
                        denied.append(folder)
                        continue
                self._names += names
                if inner is None:
                    groups.add(folder.parent)
                    yield folder
                else:
                    below += inner
            level, depth = below, depth + 1
        yield from (folder for folder in denied if folder.parent in groups)

    def _is_known(self, folder: Path) -> bool:
        return self._index is not None and bool(self._index.known(below(self._root, folder)))

    def _end(self, depth: int) -> None:
        self.cut = (
            f"the folder is so large that the search stopped {depth} levels below it, after "
            f"{self._names} names. Pass a folder closer to the runs."
        )
        if str(self._root.absolute()) not in _logged:
            _logged.add(str(self._root.absolute()))
            _log.warning("there may be more runs in %r: %s", str(self._root), self.cut)
        if self._index is not None:
            self._index.cut = self.cut


_logged: set[str] = set()  # roots already logged: the viewer searches every second


def _content(folder: Path) -> tuple[int, list[Path] | None]:
    """Return the number of names in a folder, and the folders in it; None for a run's folder.

    Raises:
        PermissionError: this user may not read the folder.
    """
    try:
        with os.scandir(folder) as found:
            entries = list(found)
        if {DATABASE, RANKS, LAST_SEEN} & {entry.name for entry in entries} and is_run(folder):
            return len(entries), None
    except (DamagedRunError, AccessError):
        return 0, None
    except PermissionError:
        raise
    except OSError:
        return 0, []
    return len(entries), [
        folder / name for name in sorted(e.name for e in entries if _is_folder(e))
    ]


def _run_places(root: Remote, index: Index | None) -> Iterator[Remote]:
    if is_run(root):
        yield root
        return
    found: dict[Remote, None] = {}
    names = Objects(root).names()
    for place in databases_among(root, names):
        of_rank = place.parent.name == RANKS and is_rank(place.name)
        found[place.parent.parent if of_rank else place] = None
    runs = [run for run in found if not any(above in found for above in _above(run))]
    if index is not None:
        index.listed({below(root, run): _names_of(names, below(root, run)) for run in runs})
    yield from runs


def _names_of(names: list[str], run: str) -> list[str]:
    """Return the names of a run's objects, of all sorted names."""
    return names[bisect_left(names, f"{run}/") : bisect_left(names, f"{run}0")]  # "0" follows "/"


def _above(place: Remote) -> Iterator[Remote]:
    while place.parent != place and place.key:
        place = place.parent
        yield place


def is_run(folder: Location) -> bool:
    """Whether the folder holds a run: its database, or one of a rank other than the first.

    A run whose process has not written anything yet counts as well.
    """
    if database_exists(folder) or is_begun(folder):
        return True
    if isinstance(folder, Remote):
        return False  # ranks in a bucket are found by listing
    return (folder / RANKS).is_dir() and bool(rank_paths(folder))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a visible folder. Links could lead out of the tree or form loops."""
    try:
        return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
    except OSError:
        return False
