"""What lies beside the databases of a run: its spec, a program's own output. It is copied along."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .folder import copy_file, plain_files, read_file
from .layout import DATABASE
from .location import Location, Remote
from .remote import Objects

RANKS = "ranks"
"""The folder in which each rank of a distributed training has a database of its own."""

DRAFT = ".compacting"
"""The folder in which a compaction prepares its work."""

_MOST = 4 << 30
"""Bytes of a file that is written to a bucket."""

_OURS = (DATABASE, RANKS, DRAFT)


def copy_files(source: Location, target: Location) -> None:
    """Copies what lies beside the databases, but no links, pipes and devices."""
    if isinstance(source, Path) and isinstance(target, Path):
        _copy_here(source, target)
        return
    for name, content in _contents(source):
        if isinstance(target, Remote):
            Objects(target).write(str(name), content)
        else:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _copy_here(source: Path, target: Path) -> None:
    for name in plain_files(source, without=_OURS):
        copy_file(source, str(name), target / name)


def _contents(source: Location) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yields the name, below the run, and the content of each file."""
    if isinstance(source, Remote):
        objects = Objects(source)
        for key in filter(_is_plain, objects.names()):
            content = objects.read(key, most=_MOST)
            if content is not None:
                yield PurePosixPath(key), content
        return
    for name in plain_files(source, without=_OURS):
        content = read_file(source, str(name), most=_MOST)
        if content is not None:
            yield name, content


def _is_plain(name: str) -> bool:
    """Whether an object may become a file of that name: nobody knows who has named it."""
    parts = name.split("/")
    strange = any(part in ("", ".", "..") or set(part) & set("\\\0:") for part in parts)
    return not strange and parts[0] not in _OURS
