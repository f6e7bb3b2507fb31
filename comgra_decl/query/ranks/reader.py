"""Read the databases of multiple ranks as one run.

`JoinedReader` and `JoinedView` correspond to `Reader` and `View`. A record exists as soon as all
ranks have it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from comgra_decl.errors import (
    DamagedRunError,
    RunNotFoundError,
    StoreError,
    UnknownNameError,
    shown,
)
from comgra_decl.records import MESH, SlotKey
from comgra_decl.store import Reader, RunMeta
from comgra_decl.store.copying import Progress
from comgra_decl.store.database import database_exists
from comgra_decl.store.last_seen import is_begun
from comgra_decl.store.location import Location, Remote
from comgra_decl.store.remote import databases_within
from comgra_decl.store.view import View

from .batches import same_batch
from .joined_copy import joined_view, write_joined
from .side_by_side import side_by_side
from .view import JoinedView

RANKS = "ranks"
PATIENCE = 60.0
"""Seconds after the start of a run during which the reader waits for missing ranks."""


def is_rank(name: str) -> bool:
    """Whether a folder's name is a rank number."""
    return name.isascii() and name.isdecimal() and len(name) < 8


def rank_paths(run: Location) -> Mapping[int, Location]:
    """Return the folders of a run's databases by rank; {0: run} for a run of one process."""
    if isinstance(run, Remote):
        return _rank_places(run)
    found = {}
    folder = run / RANKS
    if folder.is_symlink():
        raise DamagedRunError(f"{str(folder)!r} is a link; it must be in the run's folder.")
    if folder.is_dir():
        for path in folder.iterdir():
            if is_rank(path.name) and path.is_symlink():
                raise DamagedRunError(f"{str(path)!r} is a link; it must be in the run's folder.")
            if is_rank(path.name) and database_exists(path):
                found[int(path.name)] = path
    if database_exists(run):
        leader = Reader(run)
        facts = ranks_of(leader)
        found[int(facts["rank"]) if facts else 0] = run
    return dict(sorted(found.items()))


def _rank_places(run: Remote) -> dict[int, Remote]:
    """Like `rank_paths`, but requests each rank only after determining which ranks exist."""
    if not database_exists(run):
        there = [place for place in databases_within(run / RANKS) if is_rank(place.name)]
        return {int(place.name): place for place in sorted(there)}
    facts = ranks_of(Reader(run)) or {"rank": 0, "recorded": []}
    own = int(facts["rank"])
    return dict(sorted({own: run, **_existing(run, {*facts["recorded"]} - {own})}.items()))


def _existing(run: Remote, ranks: Collection[int]) -> dict[int, Remote]:
    """Return the places of those ranks that have a database."""
    places = {int(rank): run / RANKS / str(rank) for rank in ranks}
    there = side_by_side(database_exists, places.values(), far=True)
    return dict(compress(places.items(), there))


def ranks_of(reader: Reader) -> dict[str, Any] | None:
    """Return the rank, world_size and recorded ranks of a database; None for one process."""
    facts = reader.meta.facts.get("ranks") or reader.view.read_document("ranks")
    return facts if isinstance(facts, dict) else None


def _refuse_strangers(readers: Mapping[int, Reader], *, far: bool) -> None:
    """Reject a database in a rank's folder that belongs to another rank or training job.

    Raises:
        DamagedRunError: data from two training jobs would be joined.
    """
    known: tuple[Any, Any] | None = None
    told = side_by_side(ranks_of, readers.values(), far=far) if len(readers) > 1 else []
    for (rank, reader), facts in zip(readers.items(), told, strict=False):
        if facts is None:
            if not reader.head["n"]:
                continue  # its first record may still contain the facts
            why = "is a run of one process"
        elif int(facts["rank"]) != rank:
            why = f"belongs to rank {facts['rank']}"
        else:
            training = facts.get("run"), facts.get("world_size")
            known = known or training
            if training == known:
                continue
            why = f"is from another training job ({training[0]}, of {training[1]} processes)"
        raise DamagedRunError(
            f"{str(reader.path)!r} is in the folder of rank {rank} but {why}, so it is not joined "
            "with the other ranks. Move it out of the run's folder; it can be opened separately."
        )


def open_reader(path: Location, rank: int | None = None) -> Reader | JoinedReader:
    """Open a run, or one rank of it.

    Args:
        path: the run's folder.
        rank: the rank to open; None: all of them together.

    Raises:
        UnknownNameError: the run has no such rank.
        RunNotFoundError: there is no run.
    """
    if rank is None:
        leader = _leader(path)
        facts = None if leader is None else leader.meta.facts.get("ranks")
        if leader is not None and (facts is None or len(facts["recorded"]) == 1):
            return leader
        return JoinedReader(path, leader)
    paths = rank_paths(path)
    if str(rank) not in map(str, paths):
        raise UnknownNameError(
            f"rank {shown(rank)} was not recorded; "
            f"this run has {', '.join(map(str, paths)) or 'none'}."
        )
    return Reader(paths[int(rank)])


def _leader(path: Location) -> Reader | None:
    """Return the reader of the database in a run's folder; None if ranks have folders there."""
    if isinstance(path, Remote):
        return _opened(path)
    alone = not (path / RANKS).is_dir()
    there = alone and (database_exists(path) or is_begun(path))
    return Reader(path) if there else None


def _opened(path: Location) -> Reader | None:
    try:
        return Reader(path)
    except RunNotFoundError:  # currently being created
        return None


def _documents(reader: Reader) -> Mapping[str, Any]:
    """Return the revisions of a rank's documents by name; reads nothing."""
    found: Mapping[str, Any] = reader.head.get("documents") or {}
    return found


def _mesh_of(view: View) -> dict[str, int] | None:
    found: dict[str, int] | None = view.document(MESH)
    return found


def _view_of(reader: Reader) -> View:
    return reader.view


def _polled(reader: Reader) -> bool:
    return reader.poll()


def _passed(reader: Reader) -> tuple[int, bool]:
    """Return how often a database was resumed, and whether it was compacted."""
    return len(reader.head.get("sessions", ())), bool(reader.head.get("compacted"))


class JoinedReader:
    """Reads all ranks of a run together, with the interface of `Reader`. Thread-safe."""

    def __init__(self, path: Location, leader: Reader | None = None) -> None:
        """Open the existing ranks; others are added as they appear.

        Args:
            path: the run's folder.
            leader: the reader of the database in the run's folder itself, if it is open.

        Raises:
            RunNotFoundError: no rank exists.
        """
        self.path = path
        self.far = isinstance(path, Remote)
        self._lock = threading.Lock()
        self.readers: dict[int, Reader] = {}
        self._order: dict[SlotKey, int] = {}  # slot numbers never change while the run is open
        self._view: JoinedView | None = None
        self._coordinates: dict[int, dict[str, int]] = {}
        if leader is not None:
            self._look_beside(leader)
        if not self.readers:
            self._look()
        if not self.readers:
            raise RunNotFoundError(f"there is no run in {str(path)!r}.")

    def _look_beside(self, leader: Reader) -> None:
        """Open the ranks of a run in a bucket, which the leader lists."""
        facts = ranks_of(leader)
        if isinstance(self.path, Remote) and facts is not None:
            own, places = int(facts["rank"]), [*map(int, facts["recorded"])]
            self._add(
                {rank: self.path / RANKS / str(rank) for rank in places if rank != own},
                {own: leader},
            )

    def _look(self) -> bool:
        return self._add(self._places(), {})

    def _add(self, places: Mapping[int, Location], known: Mapping[int, Reader]) -> bool:
        """Open ranks that are not open yet; return whether there are any."""
        new = {rank: path for rank, path in places.items() if rank not in self.readers}
        opened = zip(new, side_by_side(_opened, new.values(), far=self.far), strict=True)
        found = {**known, **{rank: reader for rank, reader in opened if reader is not None}}
        if not found:
            return False
        readers = dict(sorted({**self.readers, **found}.items()))  # others may use the old one
        _refuse_strangers(readers, far=self.far)
        self.readers = readers
        return True

    def _places(self) -> Mapping[int, Location]:
        """Return where ranks are that may not be open yet."""
        if isinstance(self.path, Remote) and self.readers:  # a request for each
            return _existing(self.path, self.missing)
        return rank_paths(self.path)

    @property
    def leader(self) -> Reader:
        """Reader of the first rank, whose graph, modules and notes are used for the run."""
        return next(iter(self.readers.values()))

    @property
    def missing(self) -> list[int]:
        """Ranks that should be recorded but have no data."""
        facts = map(ranks_of, self.readers.values())
        recorded = next((f["recorded"] for f in facts if f is not None), ())
        return [int(rank) for rank in recorded if rank not in self.readers]

    @property
    def meta(self) -> RunMeta:
        """Metadata from the first rank, with the sample count of all ranks together."""
        meta, batches = self.leader.meta, same_batch(self.readers, self.coordinates)
        return replace(meta, sample_count=meta.sample_count * len(batches))

    @property
    def coordinates(self) -> dict[int, dict[str, int]]:
        """Coordinates of each rank in the job's device mesh; empty if it has none."""
        if len(self._coordinates) < len(self.readers):
            known = {r: reader for r, reader in self.readers.items() if MESH in _documents(reader)}
            left = [rank for rank in known if rank not in self._coordinates]
            views = side_by_side(_view_of, [self.readers[rank] for rank in left], far=self.far)
            told = side_by_side(_mesh_of, views, far=self.far)
            new = {r: found for r, found in zip(left, told, strict=True) if found is not None}
            self._coordinates = self._coordinates | new
        return self._coordinates

    @property
    def head(self) -> Mapping[str, Any]:
        """Head from the first rank, with the number of records that all ranks have."""
        steps = self.view.train_steps
        errors = [
            f"rank {rank}: {reader.head['error']}"
            for rank, reader in self.readers.items()
            if reader.head.get("error")
        ]
        return {
            **self.leader.head,
            "n": self.view.n,
            "step": int(steps[-1]) if len(steps) else None,
            "error": "; ".join(errors) or None,
        }

    @property
    def state(self) -> str:
        """State of the run: "live" while any rank is, "finished" if all are; see `Reader.state`.

        "stopped" if any rank was stopped from outside, else "failed" if the program failed.
        """
        states = {reader.state for reader in self.readers.values()}
        if states & {"live", "waiting"}:
            return "live" if self.view.n else "waiting"
        return next(state for state in ("stopped", "failed", "finished") if state in states)

    @property
    def view(self) -> JoinedView:
        """The records as of the last poll."""
        with self._lock:
            if self._view is None:
                views = side_by_side(_view_of, self.readers.values(), far=self.far)
                self._view = JoinedView(
                    dict(zip(self.readers, views, strict=True)),
                    meta=self.meta,
                    order=self._order,
                    complete=not self._waits(),
                    far=self.far,
                    coordinates=self.coordinates,
                )
                if not self.missing:
                    self._view.use_copy(joined_view(self.path / RANKS, self.readers))
            return self._view

    def join(self, progress: Progress | None = None) -> Path:
        """Write the statistics of all ranks together, so that they need not be joined again.

        Returns:
            The folder of the new database.

        Raises:
            DamagedRunError: a part of a rank is damaged; nothing was written.
            StoreError: the run is being written, is in a bucket, lacks a rank, or its folder is not
                writable.
        """
        if isinstance(self.path, Remote):
            raise StoreError(f"{str(self.path)!r} is in a bucket; join a local copy instead.")
        if self.state in ("live", "waiting"):
            raise StoreError(
                f"{str(self.path)!r} is still being recorded; join it once it has ended."
            )
        if self.missing:
            missing = ", ".join(map(str, self.missing))
            raise StoreError(f"{str(self.path)!r} lacks the data of rank {missing}.")
        return write_joined(self.path / RANKS, self.view, self.readers, progress)

    def poll(self) -> bool:
        """Poll the ranks; return whether anything is new.

        The first rank is always polled, and a rank that has ended only until it has been resumed
        and compacted as the first one has: what is done to one rank of a job is done to all.
        """
        with self._lock:
            news = [self.leader.poll()]
            wanted = _passed(self.leader)
            others = [reader for reader in self.readers.values() if reader is not self.leader]
            due = [r for r in others if not r.head["closed"] or _passed(r) != wanted]
            news += side_by_side(_polled, due, far=self.far)
            changed = self._look() or any(news)
            waited = self._view is not None and not self._view.complete
            if changed or (waited and not self._waits()):
                self._view = None
                return True
            return False

    def _waits(self) -> bool:
        """Whether a missing rank may still appear."""
        young = time.time() - self.leader.meta.started < PATIENCE
        alive = any(reader.state in ("live", "waiting") for reader in self.readers.values())
        return bool(young and alive and self.missing)
