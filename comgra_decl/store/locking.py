"""Lock folders while a run is being changed; locks are released when their process ends.

A compaction holds the database's lock throughout. A compaction briefly holds the run's lock while
it moves the new database into place, as does a program that resumes the run. As a result, neither
sees an intermediate state of the other. Readers of an old version hold the lock of the data files,
so that a writer that merges them does not remove those of that version.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from comgra_decl.errors import StoreError

from .location import Location


@contextmanager
def alone(database: Path) -> Iterator[None]:
    """Hold the lock on a database's folder. Raises StoreError if another process holds it."""
    with _held(database) as lock:
        if lock is not None and not _taken(lock, wait=False):
            raise StoreError(f"{str(database.parent)!r} is already being compacted.")
        yield


@contextmanager
def settled(run: Location) -> Iterator[None]:
    """Wait for the lock on a run's folder and hold it.

    Buckets support neither locks nor compaction, so fenced commits are sufficient there.
    """
    with _held(run) as lock:
        if lock is not None:
            _taken(lock, wait=True)
        yield


@contextmanager
def held_alone(folder: Path) -> Iterator[bool]:
    """Try to hold the lock on a folder; yield whether it succeeded (False without locks)."""
    with _held(folder) as lock:
        yield lock is not None and _taken(lock, wait=False)


@contextmanager
def taken_if_free(folder: Path) -> Iterator[bool]:
    """Try to hold the lock on a folder; yield whether no other process holds it.

    Also yields True where there are no locks.
    """
    with _held(folder) as lock:
        yield lock is None or _taken(lock, wait=False)


def keep_files(owner: object, folder: Path) -> None:
    """Keep the writer of a run from removing data files in a folder while `owner` exists."""
    if os.name != "posix":
        return
    import fcntl

    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)  # a writer holds it for milliseconds
        weakref.finalize(owner, os.close, handle)


@contextmanager
def _held(folder: Location) -> Iterator[int | None]:
    """Yield a handle to a folder; None if it cannot be locked (in a bucket, without POSIX)."""
    if not isinstance(folder, Path) or os.name != "posix":
        yield None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        _release(handle)
        os.close(handle)


def _release(handle: int) -> None:
    """Release a lock; closing the handle does not if a forked child has it, too."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


def _taken(handle: int, *, wait: bool) -> bool:
    """Take a lock; return whether it was taken.

    Also returns True if the file system has no locks. In that case, only TensorStore's own locks
    apply.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
