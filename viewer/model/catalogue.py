"""The runs below a folder and the open runs, shared by all sessions of a process."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import ComgraError, RunNotFoundError, did_you_mean
from comgra_decl.query import Index, Location, RunSummary, listed, location, open_run
from comgra_decl.viewer.model.library import Library
from comgra_decl.viewer.model.ranks import rank_in, without_rank
from comgra_decl.viewer.model.runview import RunView

OPEN_RUNS, HELD = 8, 384 << 20
"""Maximum number of open runs, and maximum size of their caches in bytes.

The least recently used run is closed first.
"""

_BETWEEN_LISTS = 2.0  # seconds
_BETWEEN_LOOKS = 0.2  # seconds
_BETWEEN_REQUESTS = 5.0  # seconds; in a bucket, a run commits every ten seconds
_SHARE = 20  # listing may take at most 1/20 of the time
_UNREADABLE = ("damaged", "unreadable")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run in the run selector. `name` is its path below the root.

    Contains no data that changes with each record, so that the list stays the same.
    """

    name: str
    group: str
    label: str
    state: str
    empty: bool

    @property
    def readable(self) -> bool:
        """Whether the run can be opened."""
        return self.state not in _UNREADABLE


class Catalogue:
    """Lists runs and refreshes open ones.

    Args:
        root: Folder of runs, a group, a single run, or a location in a bucket. May not exist yet.

    Attributes:
        entries: The listed runs, newest first; the same object until its contents change.
        summaries: The listed runs with their current numbers of records, newest first, by name.
        index: What is known about runs that have ended.
        library: Facts, metrics and series of all runs.
    """

    def __init__(self, root: Location) -> None:
        self.root = location(root)
        self.index = Index(self.root)
        self.entries: tuple[RunEntry, ...] = ()
        self.summaries: dict[str, RunSummary] = {}
        self.problem = ""
        self._paths: dict[str, Location] = {}
        self._views: OrderedDict[str, RunView] = OrderedDict()
        self._looked: dict[str, float] = {}
        self._lister = ThreadPoolExecutor(1, "comgra_decl list")
        self._listing: Future[list[RunSummary]] | None = None
        self._began = 0.0
        self._due: float | None = None  # None: never listed
        self.library = Library(self)

    def poll(self, *, wait: bool = False) -> None:
        """Refresh the list of runs if it is due. Runs in the background unless `wait` is set."""
        if self._due is None or (wait and time.monotonic() >= self._due):
            self.refresh()
        elif self._listing is not None:
            if self._listing.done():
                self._take(self._listing)
        elif time.monotonic() >= self._due:
            self._begin()

    def refresh(self) -> None:
        """Refresh the list of runs and wait for it."""
        self._take(self._begin())

    def entry(self, name: str) -> RunEntry | None:
        """Return the listed run with that name or with that rank, or None."""
        return next((e for e in self.entries if e.name == without_rank(name)), None)

    def path(self, name: str) -> Location | None:
        """Return the location of a listed run, or None."""
        return self._paths.get(without_rank(name))

    def default(self) -> str:
        """Return the name of the newest readable run with records, or else the first run's name.

        Returns "" if there is no run.
        """
        readable = [entry for entry in self.entries if entry.readable]
        recorded = [entry for entry in readable if not entry.empty]
        ranked = recorded or readable or list(self.entries)
        return ranked[0].name if ranked else ""

    def open(self, name: str) -> RunView:
        """Return a listed run or one of its ranks.

        Raises:
            ComgraError: The run cannot be read.
        """
        return self._open(without_rank(name)).rank(rank_in(name))

    def _open(self, name: str) -> RunView:
        if name not in self._paths:
            self._views.pop(name, None)
            near = did_you_mean(name, self._paths)
            raise RunNotFoundError(f"There is no run {name!r} below {self.root}{near or '.'}")
        if name not in self._views:
            self._views[name] = RunView(open_run(self._paths[name]))
            self._looked[name] = time.monotonic()
            self._let_go()
        self._views.move_to_end(name)
        return self._views[name]

    def _let_go(self) -> None:
        """Close the least recently used runs until the limits are met; keeps the last one."""
        held = [view.held for view in self._views.values()]
        while len(held) > 1 and (len(held) > OPEN_RUNS or sum(held) > HELD):
            self._views.popitem(last=False)
            held.pop(0)

    def look(self, name: str) -> RunView:
        """Return the run with all new records on disk.

        Raises:
            RunNotFoundError: The run's folder no longer exists.
            ComgraError: The run can no longer be read.
        """
        name, rank = without_rank(name), rank_in(name)
        view = self._open(name)
        now = time.monotonic()
        path = self._paths[name]
        here = isinstance(path, Path)
        if now - self._looked.get(name, -1e9) >= (_BETWEEN_LOOKS if here else _BETWEEN_REQUESTS):
            self._looked[name] = now
            if isinstance(path, Path) and not path.exists():
                self._views.pop(name, None)
                raise RunNotFoundError(f"The run's folder no longer exists: {path}")
            view.refresh()
            self._let_go()
        return view.rank(rank)

    def _begin(self) -> Future[list[RunSummary]]:
        self._began = time.monotonic()
        self._listing = self._lister.submit(listed, self.index)
        return self._listing

    def _take(self, listing: Future[list[RunSummary]]) -> None:
        """Store a finished listing, newest run first."""
        try:
            found = listing.result()
            self.problem = ""
        except (ComgraError, OSError) as error:
            found, self.problem = [], str(error)
        now = time.monotonic()
        self._due = now + max(_BETWEEN_LISTS, (now - self._began) * _SHARE)
        self._listing = None
        newest = sorted(found, key=lambda run: run.started or 0.0, reverse=True)
        self.summaries = {self._name(run): run for run in newest}
        self._paths = {name: location(run.path) for name, run in self.summaries.items()}
        entries = tuple(self._entry(run) for run in newest)
        if entries != self.entries:  # keep the same object if nothing has changed
            self.entries = entries

    def _name(self, run: RunSummary) -> str:
        path, root = location(run.path), self.root
        if path == root:
            return path.name
        if isinstance(path, Path):
            return path.relative_to(str(root)).as_posix()
        assert not isinstance(root, Path)
        return path.relative_to(root).as_posix()

    def _entry(self, run: RunSummary) -> RunEntry:
        name = self._name(run)
        group, _, label = name.rpartition("/")
        return RunEntry(name, group, label, run.state, not run.records)
