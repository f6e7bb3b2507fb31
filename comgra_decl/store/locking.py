"""Who may change a run just now: locks on folders, which end with the process that holds them.

A compaction holds that of the database from its first look to its last. That of the run is held for
a moment: by a compaction that puts the new database in place, and by a program that goes on with
the run. So neither sees what the other has done half.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from comgra_decl.errors import StoreError

from .location import Location


@contextmanager
def alone(database: Path) -> Iterator[None]:
    """Holds the lock on a database's folder; StoreError if another process has it."""
    with _held(database) as lock:
        if lock is not None and not _taken(lock, wait=False):
            raise StoreError(f"{str(database.parent)!r} is being compacted already.")
        yield


@contextmanager
def settled(run: Location) -> Iterator[None]:
    """Holds the lock on a run's folder, after waiting for whoever has it.

    Nothing compacts a run in a bucket, which has no locks: that commits are fenced must do there.
    """
    with _held(run) as lock:
        if lock is not None:
            _taken(lock, wait=True)
        yield


@contextmanager
def held_alone(folder: Path) -> Iterator[bool]:
    """Holds the lock on a folder; yields whether it has got it, False where there are no locks."""
    with _held(folder) as lock:
        yield lock is not None and _taken(lock, wait=False)


@contextmanager
def _held(folder: Location) -> Iterator[int | None]:
    """Yields a handle of a folder; None where it cannot be locked (a bucket, not POSIX)."""
    if not isinstance(folder, Path) or os.name != "posix":
        yield None
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _taken(handle: int, *, wait: bool) -> bool:
    """Takes a lock; True also where the file system has none: TensorStore's own must do then."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
