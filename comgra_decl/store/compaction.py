"""Compact a finished run without changing any recorded number.

A record in a complete block is also stored as a row, and OCDBT keeps every version of its index.
Compaction copies the run to an adjacent folder, without the duplicate rows and the old versions. It
reads the copy back and moves the data files of the copy next to the old ones. A single rename then
replaces the manifest. Readers see the complete old run before the rename and the complete new run
after it. If a compaction is killed, it leaves unreferenced files, which the next compaction
removes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import DamagedRunError, StoreError

from .beside import DRAFT
from .copying import Progress, pinned, transfer
from .database import Database, database_path, new_context
from .layout import DATABASE
from .location import Remote, Where, location
from .locking import alone, settled
from .reader import Reader
from .verify import verify

_MANIFEST = "manifest.ocdbt"
_OURS = re.compile(r"[0-9a-f]{32}(\.__lock)?")
"""Name patterns of TensorStore's data files, and of files that a killed writer has left."""


@dataclass(frozen=True)
class Compacted:
    """Result of a compaction: bytes and files of the whole database, before and after."""

    path: Path
    bytes_before: int
    bytes_after: int
    files_before: int
    files_after: int


def compact(path: Where, *, progress: Progress | None = None) -> Compacted:
    """Compact a finished database in place; safe to kill at any moment.

    Open readers must refresh afterwards (`Run.refresh`).

    Args:
        path: the folder of the run or of one of its ranks; see `copying.databases`.
        progress: called with the progress.

    Raises:
        RunNotFoundError: there is no run.
        DamagedRunError: part of the run cannot be read; nothing was changed. If the record of a
        damaged row is also in a complete block, the row is dropped like any other duplicate.
        StoreError: the run is being written or compacted, is in a bucket, or its folder is not
            writable.
    """
    place = location(path)
    if isinstance(place, Remote):
        raise StoreError(
            f"{str(place)!r} is in a bucket, where data cannot be replaced atomically. "
            "Make a compact copy instead: comgra-decl cp --compact"
        )
    run = place.resolve()
    reader = pinned(run)
    _refuse_live(reader)
    database = Path(database_path(run))
    with _written(run), alone(database):
        before = _size(database)
        draft = run / DRAFT
        _remove(draft)
        _write_draft(reader, draft, progress)
        _check(draft, progress)
        with settled(run):
            if Reader(run, context=new_context(cache_bytes=0)).head != reader.head:
                _remove(draft)
                raise StoreError(f"{str(run)!r} has changed in the meantime; it was not compacted.")
            _swap(draft / DATABASE, database)
        _remove(draft)
        return Compacted(run, *_interleaved(before, _size(database)))


def _refuse_live(reader: Reader) -> None:
    if reader.state in ("live", "waiting"):
        raise StoreError(
            f"{str(reader.path)!r} is still being recorded. Compact it once it has ended, or make "
            "a compact copy of its current state: comgra-decl cp --compact"
        )


def _write_draft(reader: Reader, draft: Path, progress: Progress | None) -> None:
    # keep the identity so that open readers can continue
    context = new_context(cache_bytes=0, copy_threads=2)
    target = Database(draft, context, uuid=reader.database.uuid)
    head = {**reader.head, "compacted": time.time()}
    transfer(reader, target, head=head, compact=True, progress=progress)


def _check(draft: Path, progress: Progress | None) -> None:
    """Read the copy back. Its chunks are byte-identical to the run's, so both are checked."""
    verdict = verify(draft, progress=progress)
    if not verdict.whole:
        first = verdict.damages[0]
        _remove(draft)
        raise DamagedRunError(
            f"{str(draft.parent)!r} is damaged at {first.where!r} ({first.reason}); nothing was "
            "changed. See: comgra-decl verify"
        )


def _swap(new: Path, old: Path) -> None:
    """Replace the old database; renaming the manifest is the commit point."""
    kept = set()
    (old / "d").mkdir(exist_ok=True)
    for path in [*(new / "d").iterdir()]:
        path.replace(old / "d" / path.name)
        kept.add(path.name)
    _settle(old / "d")
    (new / _MANIFEST).replace(old / _MANIFEST)
    _settle(old)
    for path in [*(old / "d").iterdir()]:
        if path.name not in kept and _OURS.fullmatch(path.name) and not path.is_symlink():
            path.unlink()


def _settle(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _written(run: Path) -> Iterator[None]:
    """Convert OS errors to StoreError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (StoreError, DamagedRunError)):
            raise
        raise StoreError(f"cannot compact {str(run)!r}: {error}") from error


def _remove(draft: Path) -> None:
    if draft.is_symlink():
        raise StoreError(f"{str(draft)!r} is a link; remove it first.")
    shutil.rmtree(draft, ignore_errors=True)


def _size(folder: Path) -> tuple[int, int]:
    """Return the number of bytes and files below a folder."""
    sizes = [p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return sum(sizes), len(sizes)


def _interleaved(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int, int, int]:
    return before[0], after[0], before[1], after[1]
