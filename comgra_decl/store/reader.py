"""Read a live or finished run by polling `head`, and return consistent views."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import tensorstore as ts

from comgra_decl.errors import ComgraError, DamagedRunError, RunNotFoundError, UnwrittenRunError

from .database import Database, database_exists, is_bound, new_context, newest_version
from .folder import MANIFEST
from .last_seen import is_begun, last_seen, last_writer
from .layout import DATABASE, HEAD_KEY, LOGS, RUN_KEY, log_key
from .location import Location, Remote, Where, location
from .meta import RunMeta, check_version, holds_folder, writer_alive
from .plausible import check_forms, check_head
from .scalars import ScalarReader
from .sums import SumsReader
from .tables import WRONG, Tables
from .view import View

CACHE_BYTES = 128 << 20
"""Default size in bytes of the cache that all readers of a process share. It holds decoded chunks
and index nodes."""

_CREATION = 10.0
"""Seconds for which a run without its first key is assumed to be under construction."""

_MOST_META = 16 << 20
"""Maximum size, in bytes, of the keys that are read first. Usually, it is about ten thousand
bytes."""

_SMALL = 8 << 20
_passing: ContextVar[ts.Context | None] = ContextVar("comgra_decl cache", default=None)
_context: ts.Context | None = None
_limit = CACHE_BYTES


def limit_cache(nbytes: int) -> None:
    """Limit the cache shared by readers that this process opens from now on.

    Args:
        nbytes: total size of decoded chunks and index nodes, for all readers together.
    """
    global _context, _limit
    if nbytes != _limit:
        _context, _limit = None, nbytes


@contextmanager
def small_cache() -> Iterator[None]:
    """Give runs that are opened in this context a small cache of their own.

    For reading many runs once: they neither fill the shared cache, nor stay in memory in it.
    """
    before = _passing.set(new_context(cache_bytes=_SMALL, copy_threads=2))
    try:
        yield
    finally:
        _passing.reset(before)


def _shared_context(*, renew: bool = False) -> ts.Context:
    global _context
    if (passing := _passing.get()) is not None and not renew:
        return passing
    if _context is None or renew:
        _context = new_context(cache_bytes=_limit, copy_threads=2)
    return _context


class Reader:
    """Reads a run below `head.n`. Thread-safe.

    `view` is the state at the last poll. A view never changes.
    """

    def __init__(
        self,
        path: Where,
        *,
        version: int | None = None,
        context: ts.Context | None = None,
    ) -> None:
        """Open the run at `path`.

        Args:
            path: the run's folder, or its location in a bucket.
            version: database version to read permanently; None: the newest.
            context: context with separate caches; None: the process's shared one.

        Raises:
            RunNotFoundError: there is no run in this folder.
            FormatError: the run has a newer format.
            DamagedRunError: the run cannot be read; the message names key and reason.
            StoreError: the run is in an unreachable bucket.
        """
        self.path = location(path)
        self._version = version
        self._lock = threading.Lock()
        try:
            self._open(context or _shared_context())
        except DamagedRunError as error:
            if context is not None or "mismatch on uuid" not in str(error):
                raise
            # this process had opened another run in the same folder, which has since been deleted
            self._open(_shared_context(renew=True))

    def _open(self, context: ts.Context) -> None:
        far = isinstance(self.path, Remote)
        if not far:
            self._demand_database()
        self._db = Database(self.path, context, version=self._version)
        head: bytes | None = None
        bound = time.time()
        if far:  # together, because each request takes long
            document, head = self._db.read_together([RUN_KEY, HEAD_KEY], most=_MOST_META)
        else:
            document = self._db.read_bytes(RUN_KEY, most=_MOST_META)
        if document is None:
            self._demand_database()
            if isinstance(self.path, Remote):  # the manifest exists, and a copy writes it last
                raise RunNotFoundError(f"the run in {str(self.path)!r} is being created.")
            raise _unwritten(self.path)
        self._db.bound = is_bound(RUN_KEY, document)
        self.meta = RunMeta.from_json(self._db.parse(RUN_KEY, document), where=self._db.path)
        self._tables = Tables()
        self._scalars = ScalarReader(self._db)
        self._sums = SumsReader(self._db)
        self._head_bytes: bytes | None = None
        self._head: dict[str, Any] = {}
        self._view: View | None = None
        newest = self._newest()
        if head is None:
            self._read_head()
        else:
            self._use_head(head, bound)
        self._refuse_old(newest)

    def _demand_database(self) -> None:
        if not database_exists(self.path):
            if is_begun(self.path):
                raise _unwritten(self.path)
            raise RunNotFoundError(f"there is no run in {str(self.path)!r}.")

    def _newest(self) -> int | None:
        """Return the version to be read, if it can be determined without a request to a bucket."""
        if self._version is not None or isinstance(self.path, Remote):
            return self._version
        return newest_version(self.path)

    def _refuse_old(self, newest: int | None) -> None:
        """Reject a head that is not from the newest commit in the manifest."""
        found = self._head.get("generation")
        if newest is not None and isinstance(found, int) and found < newest:
            raise DamagedRunError(
                f"{self._db.path}: key {HEAD_KEY!r} is from version {found} instead of {newest}: "
                "an older data file has replaced a newer one."
            )

    @property
    def database(self) -> Database:
        """The run's database."""
        return self._db

    @property
    def head(self) -> Mapping[str, Any]:
        """The newest head: `n`, `closed`, `error`, `time`, `step`, ..."""
        return self._head

    @property
    def writer(self) -> Mapping[str, Any]:
        """Identity of the current or last writer; another process may resume a run."""
        found: Mapping[str, Any] = self._head.get("writer") or self.meta.writer
        return found

    @property
    def state(self) -> str:
        """State of the run: "waiting", "live", or one of `ENDED`."""
        head = self._head
        if head["closed"]:
            failed = "failed" if head.get("failed") else "finished"
            return "stopped" if head.get("error") else failed
        if not self._is_written() or self.is_left:
            return "stopped"
        return "live" if head["n"] else "waiting"

    @property
    def is_left(self) -> bool:
        """Whether the writer of an unclosed run is alive, but no longer writes to this folder.

        The folder is a copy, or recording has ended without closing the run.
        """
        if self._head["closed"] or not self._is_written():
            return False
        held = isinstance(self.path, Remote) or holds_folder(self.writer, self.path)
        return not held and not self._has_news()

    def _is_written(self) -> bool:
        return writer_alive(self.writer, last_commit=float(self._head["time"]))

    @property
    def view(self) -> View:
        """The records as of the last poll."""
        with self._lock:
            if self._view is None:
                self._view = self._load()
            return self._view

    def poll(self) -> bool:
        """Check for new data. Return whether `head` has changed."""
        with self._lock:
            if not self._read_head():
                return False
            self._view = None
            return True

    def _has_news(self) -> bool:
        """Return whether the next poll finds a newer head, such as that of a closed run."""
        try:
            newest = self._db.read_bytes(HEAD_KEY, most=_MOST_META, newest=True)
            return newest != self._head_bytes
        except ComgraError:
            return False

    # -- under the lock

    def _read_head(self) -> bool:
        bound = time.time()  # taken before the read, so that anything cached later is up to date
        value = self._db.read_bytes(HEAD_KEY, most=_MOST_META, newest=True)
        if value is None:
            raise DamagedRunError(f"{self._db.path}: key {HEAD_KEY!r} is missing.")
        return self._use_head(value, bound)

    def _use_head(self, value: bytes, bound: float) -> bool:
        """Check a head; return whether it is new.

        Args:
            value: its content.
            bound: a time before it was read.
        """
        self._db.head_read = bound
        if value == self._head_bytes:
            return False
        head = self._db.parse(HEAD_KEY, value)
        self._check(head)
        if head.get("uuid") != self.meta.uuid:
            raise DamagedRunError(f"{self._db.path}: the run was replaced by another; reopen it.")
        if self._head and head.get("compacted") != self._head.get("compacted"):
            # compaction removes rows, but the facts cached here still mark them as existing
            self._tables, self._scalars = Tables(), ScalarReader(self._db)
            self._sums = SumsReader(self._db)
        self._head, self._head_bytes, self._bound = head, value, bound
        return True

    def _check(self, head: Any) -> None:
        if not isinstance(head, dict):
            raise DamagedRunError(f"{self._db.path}: key {HEAD_KEY!r} is not a table.")
        check_version(head, where=self._db.path)
        try:
            check_head(head)
        except WRONG as error:
            text = f"key {HEAD_KEY!r} is invalid: {error}"
            raise DamagedRunError(f"{self._db.path}: {text}") from error

    def _load(self) -> View:
        for log in LOGS:
            self._read_log_or_report(log, int(self._head["logs"].get(log, 0)))
        tables = self._tables.snapshot()
        try:
            check_forms(tables.forms, self.meta)
        except WRONG as error:
            reason = f"key {RUN_KEY!r} is invalid: {error}"
            raise DamagedRunError(f"{self._db.path}: {reason}.") from error
        checked = self._sums if self.meta.bound else None
        view = View(
            self._db,
            self.meta,
            tables,
            self._head,
            self._bound,
            scalars=self._scalars,
            sums=checked,
        )
        self._tables.records = view.load_records()
        self._tables.damage = list(tables.damage)
        return view

    def _read_log_or_report(self, name: str, count: int) -> None:
        """Read a table; if notes or lanes are damaged, record the damage and continue."""
        try:
            self._read_log(name, count)
        except DamagedRunError as error:
            if name not in ("notes", "lanes"):
                raise
            self._tables.damage.append(f"{name} from row {self._tables.counts[name]} on: {error}")
            self._tables.counts[name] = count

    def _read_log(self, name: str, count: int) -> None:
        known = self._tables.counts[name]
        while known < count:
            key = log_key(name, known)
            rows = self._db.read_json(key)
            if not isinstance(rows, list) or not rows:
                raise DamagedRunError(f"{self._db.path}: key {key!r} contains no rows.")
            for row in rows:
                try:
                    self._tables.take(name, known, row)
                except WRONG as error:
                    raise DamagedRunError(
                        f"{self._db.path}: key {key!r} is invalid at {error}."
                    ) from error
                known += 1
                self._tables.counts[name] = known


def _unwritten(run: Location) -> RunNotFoundError | DamagedRunError:
    """Return the error for a folder whose run has no manifest, and that may be under construction.

    If the process has already reported what it does, whether it is still there decides; otherwise,
    the age of the database.
    """
    assert isinstance(run, Path)
    database = run.resolve() / DATABASE
    manifest = database / MANIFEST
    newest = next((path for path in (manifest, database) if path.exists()), run)
    changed = newest.stat().st_mtime  # the manifest is written first
    writer, seen = last_writer(run), last_seen(run)
    if writer is None:
        alive = time.time() - changed < _CREATION
    else:
        alive = writer_alive(writer, last_commit=0.0 if seen is None else seen["time"])
    if alive:
        return RunNotFoundError(f"the run in {str(run)!r} is being created.")
    last = "" if seen is None else f" The program was last seen at step {int(seen['step'])}."
    if newest is not database or not any(database.iterdir()):
        return UnwrittenRunError(
            f"{database}: nothing was written: the program that created it ended or was killed "
            f"before its first commit, or a copy was interrupted.{last} The folder can be deleted."
        )
    return DamagedRunError(
        f"{database}: 'manifest.ocdbt' is missing, so no data can be located.{last}"
    )
