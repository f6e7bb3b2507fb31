"""Write a run. Every commit is one atomic transaction, which writes `head` last."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from comgra_decl.errors import ComgraError, RunGoneError, StoreError
from comgra_decl.records import ScalarBatch, StepBatch

from .commit import Commit
from .contents import Contents
from .database import Database, TransientStoreError, new_context, newest_version
from .layout import HEAD_KEY, LOGS, RUN_KEY, SESSION_KEY
from .location import Remote, Where, location
from .merging import Merger
from .meta import FolderHandle, RunMeta, versions, writer_identity
from .reader import Reader
from .remote import Objects

_FULL = (errno.ENOSPC, errno.EDQUOT)

_NODE_CACHE = 4 << 20
"""Bytes of cached index nodes, which commits would otherwise read again.

TensorStore counts only a fraction of what they take. Over 10,000 commits of one record with 20
slots, a writer grew by 59 MB with a limit of 16 MB, and by 10 MB with this one; it was as fast."""


class RunWriter:
    """The only writer of a run. Not thread-safe: a single thread commits."""

    def __init__(self, database: Database, meta: RunMeta) -> None:
        """Use `create`."""
        self._db = database
        self._meta = meta
        self._contents = Contents(database, meta)
        self._merger = Merger(database)
        self._pid = os.getpid()
        self._head: dict[str, Any] = {}
        self._head_bytes: bytes | None = None
        self._closed = False
        self._handle: FolderHandle | None = None
        self._generation = 1
        self.usage: dict[str, float] = {}
        """Cost of writing so far; stored in `head` with the next commit."""

    @classmethod
    def create(cls, path: Where, meta: RunMeta) -> RunWriter:
        """Create the run at `path`, which may exist but must not contain a run.

        Raises:
            StoreError: a run exists, or the folder is not writable.
        """
        place = location(path)
        handle = None
        if isinstance(place, Remote):
            Objects(place).try_writing()
        else:
            _make_folder(place)
            handle = FolderHandle(place)
        meta.writer = writer_identity(handle)
        database = Database(place, new_context(cache_bytes=_NODE_CACHE))
        database.bound = meta.bound
        writer = cls(database, meta)
        writer._handle = handle
        writer._generation = newest_version(place) or 1  # TensorStore starts with an empty version
        try:
            writer._create()
        except TransientStoreError:
            writer._take_back()  # leave no empty run behind, whether or not the creation is retried
            raise
        return writer

    @classmethod
    def resume(cls, reader: Reader, meta: RunMeta) -> RunWriter:
        """Resume a run; `appending.append_to` checks the preconditions.

        Args:
            reader: reader of the run's current state.
            meta: metadata of the resuming program.

        Raises:
            StoreError: another writer has resumed the run first, or the folder is not writable.
        """
        database = Database(reader.path, new_context(cache_bytes=_NODE_CACHE))
        database.bound = reader.meta.bound
        writer = cls(database, reader.meta)
        writer._merger = Merger(database, resumed=True)
        writer._generation = newest_version(reader.path) or 1
        with database.reading("the contents of the run"):
            writer._contents.resume(reader.view, reader.head)
        with database.writing("the resumption of the run"):
            commit = Commit(database)
            if commit.read(HEAD_KEY) != database.encode(HEAD_KEY, dict(reader.head)):
                raise StoreError(f"{database.path}: another writer has changed this run.")
            if isinstance(reader.path, Path):
                writer._handle = FolderHandle(reader.path)
            meta.writer = writer_identity(writer._handle)
            head = resumed_head(reader.head, meta)
            key = SESSION_KEY.format(len(head["sessions"]) + 1)
            commit.put_json(key, meta.to_json())
            writer._finish(commit, head)
        return writer

    @property
    def records(self) -> int:
        """Number of records committed."""
        return int(self._head["n"])

    @property
    def block_steps(self) -> int | None:
        """Records per block; None before the first commit."""
        return self._contents.block_steps

    def commit(self, batches: Sequence[StepBatch], logged: Sequence[ScalarBatch] = ()) -> None:
        """Store batches and logged values atomically and durably.

        Raises:
            TransientStoreError: the disk is full or the store unreachable; nothing was stored, and
                the call may be retried.
            StoreError: the failure is permanent (another writer, no permission, damage).
        """
        self._check_usable()
        batches = [batch for batch in batches if batch.steps or batch.documents]
        if not batches and not logged:
            return
        try:
            with self._db.writing(f"the commit after record {self.records}"):
                commit = self._begin()
                self._finish(commit, self._contents.write(commit, batches, logged, self._head))
        except BaseException:
            self._contents.discard()
            raise
        self._contents.accept()
        self._merger.committed()

    @property
    def crowded(self) -> bool:
        """Whether merging files is overdue."""
        return self._merger.crowded

    def merge_files(self, *, wait: bool = False) -> bool:
        """Do a limited part of merging the files of commits; return whether more can be done.

        Needed after every commit. A failure of the store is left for the next commit to report.

        Args:
            wait: whether to wait for the process that searches in the index.
        """
        return not self._closed and self._merger.proceed(self._write_again, wait=wait)

    def _write_again(self, write: Callable[[Commit], None]) -> None:
        with self._db.writing("merged files"):
            commit = self._begin()
            write(commit)
            self._finish(commit, dict(self._head))

    def close(self, *, error: str | None = None, failed: bool = False) -> None:
        """Mark the run as finished, as failed, or as stopped by `error`. Idempotent.

        Args:
            error: why recording stopped early.
            failed: whether an exception has ended the program.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._db.writing("the end of the run"):
            ends = {"closed": True, "error": error, "failed": failed}
            commit = self._begin()
            self._contents.finish(commit, self._head)
            self._finish(commit, {**self._head, **ends})
        self._closed = True
        self._merger.end()
        self.release()

    def release(self) -> None:
        """Show readers that nothing more will be written, even if `close` has failed."""
        if os.getpid() != self._pid:
            return
        self._merger.stop()
        if self._handle is not None:
            self._handle.close()

    def _create(self) -> None:
        with self._db.writing("a new run"):
            commit = Commit(self._db)
            if commit.read(RUN_KEY) is not None:
                raise StoreError(
                    f"{self._db.path} already contains a run; runs are never overwritten. "
                    "Choose another run.name or run.root."
                )
            commit.put_json(RUN_KEY, self._meta.to_json())
            self._finish(commit, _first_head(self._meta))

    def _take_back(self) -> None:
        """Remove the remains of a failed creation, unless the creation succeeded after all."""
        place = self._db.place
        with suppress(OSError):
            if isinstance(place, Path) and self._db.read_bytes(RUN_KEY) is None:
                shutil.rmtree(place, ignore_errors=True)
                place.parent.rmdir()  # fails if the folder is not empty

    def _begin(self) -> Commit:
        """Start a fenced commit, which fails if another writer has committed."""
        commit = Commit(self._db)
        found = commit.read(HEAD_KEY)
        if not found:  # TensorStore returns empty bytes for a missing file
            raise self._db.gone()
        if found != self._head_bytes:
            raise StoreError(f"{self._db.path}: another writer has changed this run.")
        return commit

    def _finish(self, commit: Commit, head: dict[str, Any]) -> None:
        head["time"] = time.time()
        head["usage"] = self.usage
        if self._db.bound:
            # allows a reader to recognise an old head in an old data file
            head["generation"] = self._generation + 1
        encoded = self._db.encode(HEAD_KEY, head)
        commit.put(HEAD_KEY, encoded)
        try:
            commit.finish()
        except Exception:
            if not self._landed(encoded):
                raise
        self._head, self._head_bytes = head, encoded
        self._generation += 1

    def _landed(self, head: bytes) -> bool:
        """Whether a commit succeeded although it reported an error, as when a late fsync failed."""
        try:
            return self._db.read_bytes(HEAD_KEY) == head
        except ComgraError:
            return False

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("a forked child cannot write to its parent's run.")
        if self._closed:
            raise StoreError(f"{self._db.path}: the run is closed.")


def resumed_head(head: Mapping[str, Any], meta: RunMeta) -> dict[str, Any]:
    """Return the head for a program that resumes a run."""
    line = {
        "record": head["n"],
        "scalar": head.get("scalars", 0),
        "note": head["logs"].get("notes", 0),
        "time": meta.started,
    }
    changes = {"closed": False, "error": None, "failed": False, "writer": meta.writer}
    return {**head, **changes, "sessions": [*head.get("sessions", []), line]}


def _make_folder(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and not os.path.lexists(place):
            text = f"the run's folder {str(place)!r} was removed, moved or unmounted."
            raise RunGoneError(text) from error  # between two looks of `mkdir`
        kind = TransientStoreError if error.errno in _FULL else StoreError
        raise kind(f"cannot create the run's folder: {error}") from error


def _first_head(meta: RunMeta) -> dict[str, Any]:
    return {
        **versions(meta),
        "uuid": meta.uuid,
        "n": 0,
        "closed": False,
        "error": None,
        "step": None,
        "commits": 0,
        "documents": {},
        "scalars": 0,
        "logs": dict.fromkeys(LOGS, 0),
    }
