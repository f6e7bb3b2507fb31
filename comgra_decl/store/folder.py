"""The only way to a file of a run's folder: nobody knows who has made it.

A pipe would be waited for, a device read for ever, and a link lead to another folder. So only plain
files are opened, up to a size that is known beforehand. The folder of the run itself may be reached
through links. A test sees to it that nothing else opens what lies in a run.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

from comgra_decl.errors import DamagedRunError

MANIFEST = "manifest.ocdbt"

_MOST_MANIFEST = 64 << 20
_MANY_FILES = 2000

_SPARSE = 64 << 20
"""Bytes from which on a file must have some of its bytes on the disk to be copied."""


def read_file(folder: Path, name: str, *, most: int) -> bytes | None:
    """Returns the content of a file of a run's folder; None if there is none.

    Args:
        folder: of the run.
        name: of the file, below the folder.
        most: bytes that it may have.

    Raises:
        DamagedRunError: it is no plain file, is too large, or cannot be read.
    """
    try:
        handle = _opened(folder, name)
        if handle is None:
            return None
        with os.fdopen(handle, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        if isinstance(error, DamagedRunError):
            raise
        raise DamagedRunError(f"{str(folder / name)!r} cannot be read: {error}") from error
    if len(content) > most:
        raise DamagedRunError(f"{str(folder / name)!r} is larger than the {most} bytes it may have")
    return content


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copies a plain file of a run's folder; what `plain_files` does not name is refused.

    Raises:
        DamagedRunError: it is no plain file.
        OSError: it cannot be read or written.
    """
    handle = _opened(folder, name)
    if handle is None:
        raise FileNotFoundError(f"{str(folder / name)!r} is gone")
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(handle, "rb") as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    shutil.copystat(folder / name, target)


PassedOver = Callable[[str, str], None]
"""Told the name of a file, below the run, that is passed over, and why."""


def plain_files(
    folder: Path, passed_over: PassedOver, *, without: Collection[str] = ()
) -> Iterator[PurePosixPath]:
    """Yields the plain files below a folder, by name; links, pipes and devices are passed over.

    So are files that claim to be large and hold nothing: a copy of one would fill the disk.

    Args:
        folder: the folder.
        passed_over: told of each of those.
        without: names below it that are not looked at, with all that they hold.
    """
    yield from _plain_files(folder, PurePosixPath(), passed_over, without)


def _plain_files(
    folder: Path, below: PurePosixPath, passed_over: PassedOver, without: Collection[str]
) -> Iterator[PurePosixPath]:
    for entry in sorted(os.scandir(folder), key=lambda found: found.name):
        name = below / entry.name
        if str(name) in without:
            continue
        found = entry.stat(follow_symlinks=False)
        strange = _strangeness(found)
        if stat.S_ISDIR(found.st_mode):
            yield from _plain_files(Path(entry.path), name, passed_over, without)
        elif strange is None:
            yield name
        else:
            passed_over(str(name), strange)


def _strangeness(found: os.stat_result) -> str | None:
    """Returns what a file is if not a plain one that can be copied."""
    if stat.S_ISREG(found.st_mode):
        return f"it claims {found.st_size} bytes and holds none" if _is_hollow(found) else None
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return f"it is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}"


def strange_file(database: Path) -> str | None:
    """Returns what is wrong with the files of a database that is about to be opened, if anything.

    TensorStore opens them itself: it would wait for a pipe and follow a link.
    """
    try:
        if database.is_symlink():
            return f"{database.name!r} is a link"
        manifest = _status(database / MANIFEST)
        if manifest is not None:
            if not stat.S_ISREG(manifest.st_mode):
                return f"{MANIFEST!r} is no plain file"
            if manifest.st_size > _MOST_MANIFEST:
                return f"{MANIFEST!r} is larger than any that is written"
        name = _first_strange(database)
    except OSError as error:
        return f"its files cannot be listed ({error})"
    return None if name is None else f"{name!r} is no plain file"


def largest_file(database: Path) -> int | None:
    """Returns the bytes of the largest data file; None if there are too many to ask for each.

    No value can have more, so that of most runs no key must be asked for its size.
    """
    sizes = [0]
    try:
        with os.scandir(database / "d") as entries:
            for entry in entries:
                sizes.append(entry.stat(follow_symlinks=False).st_size)
                if len(sizes) > _MANY_FILES:
                    return None
    except OSError:
        return None
    return max(sizes)


def _first_strange(folder: Path) -> str | None:
    """Returns the first entry, by name, of a folder and those in it that is no file or folder."""
    if not folder.is_dir():
        return None
    strange, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif not entry.is_file(follow_symlinks=False):
                strange.append(entry.name)
    for name in folders:
        # data files have names of 32 hexadecimal digits, so one that is a folder is none
        inner = _first_strange(folder / name) if name == "d" else ""
        if inner is not None:
            strange.append(f"{name}/{inner}" if inner else name)
    return min(strange, default=None)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _is_hollow(found: os.stat_result) -> bool:
    on_disk = getattr(found, "st_blocks", found.st_size) * 512
    return found.st_size > _SPARSE and on_disk < found.st_size // 100


def _opened(folder: Path, name: str) -> int | None:
    """Opens a plain file below a folder; None if there is none."""
    path = folder
    for part in PurePosixPath(name).parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise DamagedRunError(f"{str(path)!r} is a link; a run's files lie in its folder")
    path = folder / name
    found = _status(path)
    if found is None:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise DamagedRunError(f"{str(path)!r} is no plain file")
    if _is_hollow(found):
        raise DamagedRunError(f"{str(path)!r} claims {found.st_size} bytes and holds none")
    # between the look and this it may have become something else
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedRunError(f"{str(path)!r} is no plain file")
    return handle
