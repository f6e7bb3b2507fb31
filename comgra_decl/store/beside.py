"""Files next to a run's databases, such as its spec and program output; copies include them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from comgra_decl.errors import StoreError

from .folder import PassedOver, copy_file, plain_files, read_file
from .layout import DATABASE
from .location import Location, Remote
from .remote import Objects

RANKS = "ranks"
"""Folder with a database for each rank of a distributed training job."""

DRAFT = ".compacting"
"""Folder in which a compaction prepares the new database."""

_MOST = 4 << 30
"""Maximum size, in bytes, of a file copied from or to a bucket."""


def copy_files(
    source: Location,
    target: Location,
    passed_over: PassedOver,
    *,
    databases: Sequence[Location] = (),
) -> None:
    """Copy the files next to the databases, except links, pipes and devices.

    Args:
        source: the run.
        target: its copy.
        passed_over: called with each file that is not copied.
        databases: locations of the run's databases, which are not copied.
    """
    ours = _ours(source, databases)
    if isinstance(source, Path) and isinstance(target, Path):
        for name in plain_files(source, passed_over, without=ours):
            copy_file(source, str(name), target / name)
        return
    for name, content in _contents(source, passed_over, ours):
        if isinstance(target, Remote):
            Objects(target).write(str(name), content)
        else:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _ours(source: Location, databases: Sequence[Location]) -> frozenset[str]:
    """Return the names below a run that are not files next to its databases."""
    below = [_below(source, place) for place in databases]
    return frozenset(str(path / name) for path in below for name in (DATABASE, DRAFT))


def _below(source: Location, place: Location) -> PurePosixPath:
    if isinstance(place, Remote):
        assert isinstance(source, Remote)
        return place.relative_to(source)
    assert isinstance(source, Path)
    return PurePosixPath(place.relative_to(source).as_posix())


def _contents(
    source: Location, passed_over: PassedOver, ours: Collection[str]
) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield the name (below the run) and the content of each file."""
    if isinstance(source, Remote):
        objects = Objects(source)
        for key in objects.names():
            if _is_below(key, ours):
                continue
            if not _is_plain(key):
                passed_over(key, "its name is not a valid file name")
                continue
            content = objects.read(key, most=_MOST)
            if content is not None:
                yield PurePosixPath(key), content
        return
    for name in plain_files(source, passed_over, without=ours):
        content = read_file(source, str(name), most=_MOST)
        if content is not None:
            yield name, content


def _is_below(key: str, ours: Collection[str]) -> bool:
    parts = key.split("/")
    return any("/".join(parts[:end]) in ours for end in range(1, len(parts) + 1))


def _is_plain(name: str) -> bool:
    """Whether an object name, which is untrusted, is safe as a file name."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or set(part) & set("\\\0:") for part in parts)


def refuse_within(source: Location, target: Location) -> None:
    """Raise StoreError if a copy or an export would be inside the run.

    Otherwise, the next copy would include the nested one, and compaction and readers would
    encounter files that do not belong to the run.
    """
    run = source.parent.parent if source.parent.name == RANKS else source
    if isinstance(run, Path) and isinstance(target, Path):
        inside = any(_is_same(path, run) for path in target.resolve().parents)
    elif isinstance(run, Remote) and isinstance(target, Remote):
        inside = str(target).startswith(f"{run}/")
    else:
        inside = False
    if inside:
        raise StoreError(
            f"{str(target)!r} is inside the run {str(run)!r}. Choose a location outside it."
        )


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of the two does not exist
        return False
