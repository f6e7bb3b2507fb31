"""Copy a consistent state of a run byte for byte, even while the run is being written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

from comgra_decl.errors import (
    DamagedRunError,
    RunNotFoundError,
    StoreError,
    UnknownNameError,
    UnwrittenRunError,
)

from .beside import RANKS, copy_files, refuse_within
from .commit import Commit
from .database import (
    Database,
    database_exists,
    new_context,
    newest_version,
)
from .drafts import drafted
from .folder import PassedOver
from .inventory import Region, edge_of, fact_regions, is_superseded, keys_of
from .layout import FILES_KEY, HEAD_KEY, LEVELS, RUN_KEY, RecordColumn
from .levels import write_levels
from .location import Location, Remote, Where, location
from .merging import oldest_version
from .reader import Reader
from .remote import Objects, databases_within
from .sums import SumsReader

Progress = Callable[[str, int, int], None]

_log = logging.getLogger("comgra_decl")

_NO_VERSION = "Version where generation_number="
"""Beginning of TensorStore's error message for a missing version."""

_READ = 512
"""Number of keys read concurrently."""

_COMMIT_BYTES = 64 << 20
"""Number of bytes per transaction; each transaction creates one file."""


@overload
def copy_run(
    path: Where,
    to: Path,
    *,
    version: int | None = None,
    compact: bool = False,
    progress: Progress | None = None,
    passed_over: PassedOver | None = None,
) -> Path: ...
@overload
def copy_run(
    path: Where,
    to: Where,
    *,
    version: int | None = None,
    compact: bool = False,
    progress: Progress | None = None,
    passed_over: PassedOver | None = None,
) -> Location: ...
def copy_run(
    path: Where,
    to: Where,
    *,
    version: int | None = None,
    compact: bool = False,
    progress: Progress | None = None,
    passed_over: PassedOver | None = None,
) -> Location:
    """Copy a run to `to`, which appears only when the copy is complete.

    Source and target may be in buckets. The copy contains the run as of the call. If the run is
    still being written, the copy has the state "stopped", with a reason. Other files in the run's
    folder are copied too, except links, pipes and sparse files without data.

    Args:
        path: the run's folder, or its location in a bucket.
        to: target folder or location; if it exists, the copy becomes a folder inside it, with the
            name of the run.
        version: database version (see `verify`), to recover an earlier state of a damaged run.
        compact: whether to omit duplicates.
        progress: called with the progress.
        passed_over: called with the name of each file next to the databases that is not copied, and
            the reason; by default, both are logged.

    Returns:
        The folder of the copy; a `Remote` if it is in a bucket.

    Raises:
        RunNotFoundError: there is no run.
        DamagedRunError: part of the run cannot be read.
        StoreError: the target exists, is inside the run, or cannot be written.
        UnknownNameError: the version does not exist.
    """
    source = location(path)
    source = source if isinstance(source, Remote) else source.resolve()
    sources = databases(source)
    if not sources:
        raise RunNotFoundError(f"there is no run in {str(path)!r}.")
    if version is not None and len(sources) > 1:
        raise StoreError(f"{str(path)!r} contains multiple ranks; copy a version of a single rank.")

    def fill(target: Location) -> None:
        for part in sources:
            reader = pinned(part, version)
            copy = Database(_counterpart(part, source, target), new_context(cache_bytes=0))
            transfer(reader, copy, head=_ended(reader), compact=compact, progress=progress)
        copy_files(source, target, passed_over or _log_passed_over, databases=sources)

    target = location(to)
    refuse_within(source, target)
    if isinstance(target, Remote):
        return _into_bucket(_free(target, source.name), fill)
    return _into_folder(_target(source, target), fill)


Fill = Callable[[Location], None]
"""Writes the copy of a run to an empty location."""


def _into_folder(target: Path, fill: Fill) -> Path:
    with drafted(target, "copying") as draft:
        fill(draft)
        draft.chmod(0o777 & ~_umask())
        draft.rename(target)
    return target


def _into_bucket(target: Remote, fill: Fill) -> Remote:
    """Write a copy to a bucket. Buckets lack renaming, so the run's first key is written last."""
    Objects(target).try_writing()
    try:
        fill(target)
    except BaseException:
        Objects(target.parent).remove(f"{target.name}/")  # it was empty before
        raise
    return target


def _free(target: Remote, name: str) -> Remote:
    """Return the target location; raise StoreError if it is not empty."""
    found = Objects(target).names()
    if (found or not target.key) and not database_exists(target):
        target = target / name
        found = [other for other in found if other.startswith(f"{name}/")]
    if found:
        raise StoreError(f"{str(target)!r} already exists; choose another target.")
    return target


def _counterpart(part: Location, source: Location, target: Location) -> Location:
    """Return the target location that corresponds to part of the source."""
    if isinstance(part, Remote):
        assert isinstance(source, Remote)
        return target / part.relative_to(source)
    assert isinstance(source, Path)
    return target / part.relative_to(source)


@overload
def databases(run: Path) -> list[Path]: ...
@overload
def databases(run: Location) -> Sequence[Location]: ...
def databases(run: Location) -> Sequence[Location]:
    """Return the locations of a run's databases: a single one, or one per rank."""
    if isinstance(run, Remote):
        return [p for p in databases_within(run) if p in (run, run / RANKS / p.name)]
    ranks = run / RANKS
    there = [run, *(sorted(ranks.iterdir()) if ranks.is_dir() and not ranks.is_symlink() else [])]
    return [path for path in there if not path.is_symlink() and database_exists(path)]


def pinned(run: Location, version: int | None = None) -> Reader:
    """Open a run pinned to its current or a given version, bypassing all caches."""
    newest = newest_version(run)
    number = newest if version is None else version
    unknown = version is not None and newest is not None and not 1 <= version <= newest
    if not unknown:
        try:
            return Reader(run, version=number, context=new_context(cache_bytes=0, copy_threads=2))
        except (RunNotFoundError, UnwrittenRunError):
            if version is None:
                raise
        except DamagedRunError as error:
            if version is None or newest is None:
                raise
            if _NO_VERSION not in str(error) and version >= oldest_version(run, newest):
                raise
    span = "" if newest is None else f"; its newest version is {newest}"
    raise UnknownNameError(
        f"{str(run)!r} has no version {version}{span}. The earliest versions contain no run, and "
        "merging files and compaction remove old versions. `comgra-decl verify` reports the "
        "newest intact version."
    )


def _log_passed_over(name: str, why: str) -> None:
    _log.warning("comgra: %s is not copied: %s", name, why)


def transfer(
    reader: Reader,
    target: Database,
    *,
    head: dict[str, object],
    compact: bool,
    progress: Progress | None = None,
) -> None:
    """Copy all keys in a run into an empty database, ending with those that mark it as a run.

    Args:
        reader: the run, pinned to a version.
        target: target database.
        head: head of the copy.
        compact: whether to omit data superseded by complete blocks.
        progress: called with the progress.
    """
    target.bound = reader.meta.bound
    elsewhere = (HEAD_KEY, RUN_KEY, FILES_KEY)  # the copy has other files
    keys = [key for key in reader.database.keys("", "\x7f") if key not in elsewhere]
    if compact:
        edge, scalars = edge_of(reader.view), len(reader.view.scalars)
        keys = [key for key in keys if not is_superseded(key, edge=edge, scalars=scalars)]
        facts = fact_regions(reader.view)
        changed = {key for region in facts for key in keys_of(region)}
        for region in facts:
            changed |= _copy_facts(reader.database, target, region)
        changed |= {key for key in keys if key.startswith(LEVELS)}
        keys = [key for key in keys if key not in changed]
    _copy_keys(reader.database, target, keys, progress)
    if compact:
        write_levels(reader.view, target)
    last = Commit(target)
    last.put(RUN_KEY, *reader.database.read_all([RUN_KEY]))
    generation = (newest_version(target.place.parent) or 1) + 1
    last.put_json(HEAD_KEY, head | ({"generation": generation} if target.bound else {}))
    with target.writing("the end of the copy"):
        last.finish()


def _copy_keys(
    source: Database, target: Database, keys: Sequence[str], progress: Progress | None
) -> None:
    commit, held, done = Commit(target), 0, 0
    for batch in _batches(keys, _READ):
        for key, value in zip(batch, source.read_all(batch), strict=True):
            if not value:
                raise DamagedRunError(f"{source.path}: key {key!r} is empty (a file was deleted?).")
            commit.put(key, value)
            held += len(value)
        done += len(batch)
        if held > _COMMIT_BYTES or done == len(keys):
            with target.writing("a part of the copy"):
                commit.finish()
            commit, held = Commit(target), 0
        if progress is not None:
            progress("copying", done, len(keys))


def _copy_facts(source: Database, target: Database, facts: Region) -> set[str]:
    """Copy the facts of records and mark the records as having no rows.

    Returns:
        The keys of the checksums that changed and were written.
    """
    handle, sums = source.array(facts.form), SumsReader(source)
    changed: set[str] = set()
    for part in facts.parts(_COMMIT_BYTES // 8):
        with source.reading(facts.form.name):
            table = handle[part.index].read().result()
        table[:, RecordColumn.FORM] = 1
        commit = Commit(target)
        with target.writing("a part of the copy"):
            array = target.array(part.form, transaction=commit.transaction)
            commit.write(array, part.form, part.low[0], table)
            changed |= commit.join_sums(sums)
            commit.finish()
    return changed


def _ended(reader: Reader) -> dict[str, object]:
    """Return the head for a copy, which has no writer."""
    head = dict(reader.head)
    if not head["closed"]:
        alive = reader.state in ("live", "waiting")
        why = "a copy, made while the run was being recorded" if alive else None
        head |= {"closed": alive, "error": why}
    return head


def _target(source: Location, to: Path) -> Path:
    target = to / source.name if to.is_dir() and not database_exists(to) else to
    if target.exists() or target.is_symlink():
        raise StoreError(f"{str(target)!r} already exists; choose another target.")
    return target.absolute()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _batches(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
