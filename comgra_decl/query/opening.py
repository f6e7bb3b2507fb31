"""Find and open the run at a path."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from comgra_decl.errors import ComgraError, DamagedRunError, RunNotFoundError, near_paths
from comgra_decl.store.database import database_exists
from comgra_decl.store.layout import DATABASE
from comgra_decl.store.location import Location, Remote, Where, location
from comgra_decl.store.remote import databases_within

from .ranks.reader import RANKS, is_rank, rank_paths
from .run import Run

_log = logging.getLogger("comgra_decl")

_ALWAYS = 3  # levels that are always searched, whatever their size: root/group/sweep/job
_MOST = 200_000
"""Number of file and folder names after which no deeper level is searched. Listing them takes about
a second."""


def open_run(path: Where) -> Run:
    """Open a run, live or finished.

    Args:
        path: a run's folder, or its location in a bucket (`s3://bucket/runs/train/first`). If the
            path is a group or a root, the newest run in it is opened.

    Raises:
        RunNotFoundError: there is no run at the path.
        DamagedRunError: the run cannot be read; the message names the key and the reason.
        FormatError: the run was written in a newer format.
        StoreError: the run is in a bucket that cannot be reached.
    """
    folder = location(path)
    if folder.name == DATABASE:
        folder = folder.absolute().parent
    if is_run(folder):
        return Run(folder)
    newest: Run | None = None
    failure: ComgraError | None = None
    search: Iterable[Location] = Search(folder) if isinstance(folder, Path) else run_folders(folder)
    for candidate in search:
        try:
            run = Run(candidate)
        except ComgraError as error:
            failure = error
            continue
        if newest is None or run.started > newest.started:
            newest = run
    if newest is None:
        require_folder(folder)
        if not isinstance(folder, Remote) and (folder / DATABASE).is_symlink():
            raise RunNotFoundError(
                f"{str(folder / DATABASE)!r} is a link, and links are not followed: a run must "
                "be in its own folder. Pass the folder that the link points to, or copy the run."
            )
        if isinstance(search, Search) and search.cut and failure is None:
            raise RunNotFoundError(f"no run found in {str(folder)!r}: {search.cut}")
        raise failure or RunNotFoundError(
            f"there is no run in {str(folder)!r}: neither it nor any folder below it contains a "
            "'trace.ocdbt'. Pass a run's folder, or the folder that holds the runs."
        )
    return newest


def require_folder(folder: Location) -> None:
    """Raise an error if a path is not a readable folder.

    Raises:
        RunNotFoundError: the path is missing (suggests similar names), a file, or not readable.
    """
    if isinstance(folder, Remote):
        return
    try:
        with os.scandir(folder):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise RunNotFoundError(
            f"{str(folder)!r} cannot be read: {error.strerror}. Pass a readable folder."
        ) from None
    if folder.exists():
        raise RunNotFoundError(
            f"{str(folder)!r} is a file. Pass a run's folder, or the folder that holds the runs."
        )
    if folder.is_symlink():
        raise RunNotFoundError(
            f"{str(folder)!r} is a link to {str(folder.readlink())!r}, which does not exist."
        )
    raise RunNotFoundError(f"{str(folder)!r} does not exist{near_paths(folder) or '.'}")


def run_folders(root: Location) -> Iterator[Location]:
    """Yield the run folders at or below `root`, at any depth, upper levels first.

    Skips the contents of run folders, hidden folders, links, and folders that cannot be read. A
    bucket has no folders, so all names below `root` are listed there. If a tree is too large to be
    searched completely, a warning is logged once.
    """
    if isinstance(root, Remote):
        yield from _run_places(root)
    else:
        yield from Search(root)


class Search:
    """Searches a folder and those below it for runs, one level at a time.

    Attributes:
        cut: a message with the limit and a remedy if the search was incomplete; otherwise "".
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names = 0
        self.cut = ""

    def __iter__(self) -> Iterator[Path]:
        """Yield the folders of runs."""
        level, depth = [self._root], 0
        while level:
            below: list[Path] = []
            for folder in level:
                if depth > _ALWAYS and self._names > _MOST:
                    self._end(depth - 1)
                    return
                names, inner = _content(folder)
                self._names += names
                if inner is None:
                    yield folder
                else:
                    below += inner
            level, depth = below, depth + 1

    def _end(self, depth: int) -> None:
        self.cut = (
            f"the folder is so large that the search stopped {depth} levels below it, after "
            f"{self._names} names. Pass a folder closer to the runs."
        )
        if str(self._root.absolute()) not in _logged:
            _logged.add(str(self._root.absolute()))
            _log.warning("there may be more runs in %r: %s", str(self._root), self.cut)


_logged: set[str] = set()  # roots already logged: the viewer searches every second


def _content(folder: Path) -> tuple[int, list[Path] | None]:
    """Return the number of names in a folder, and the folders in it; None for a run's folder."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
        if {DATABASE, RANKS} & {entry.name for entry in entries} and is_run(folder):
            return len(entries), None
    except DamagedRunError:
        return 0, None
    except OSError:
        return 0, []
    return len(entries), [
        folder / name for name in sorted(e.name for e in entries if _is_folder(e))
    ]


def _run_places(root: Remote) -> Iterator[Remote]:
    if is_run(root):
        yield root
        return
    found: dict[Remote, None] = {}
    for place in databases_within(root):
        of_rank = place.parent.name == RANKS and is_rank(place.name)
        found[place.parent.parent if of_rank else place] = None
    yield from (run for run in found if not any(above in found for above in _above(run)))


def _above(place: Remote) -> Iterator[Remote]:
    while place.parent != place and place.key:
        place = place.parent
        yield place


def is_run(folder: Location) -> bool:
    """Whether the folder holds a run: its database, or one of a rank other than the first."""
    if database_exists(folder):
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
