"""Open files in a run's folder, which is untrusted; all other code must use this module.

A pipe would block, reading a device might never end, and a link could lead to another folder. Only
plain files up to a size limit are therefore opened. The path to the run's folder may contain links.
A test ensures that no other code opens files in a run's folder.
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
"""Size in bytes above which a file is copied only if it occupies disk blocks (is not sparse)."""


def read_file(folder: Path, name: str, *, most: int) -> bytes | None:
    """Return the content of a file in a run's folder; None if it does not exist.

    Args:
        folder: folder of the run.
        name: path of the file below the folder.
        most: maximum size, in bytes.

    Raises:
        DamagedRunError: the file is not plain, is too large, or cannot be read.
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
        raise DamagedRunError(f"{str(folder / name)!r} is larger than the maximum of {most} bytes")
    return content


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy a plain file from a run's folder; reject files that `plain_files` does not yield.

    Raises:
        DamagedRunError: the file is not plain.
        OSError: the file cannot be read or written.
    """
    handle = _opened(folder, name)
    if handle is None:
        raise FileNotFoundError(f"{str(folder / name)!r} no longer exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(handle, "rb") as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    shutil.copystat(folder / name, target)


PassedOver = Callable[[str, str], None]
"""Called with the name of a skipped file, below the run, and the reason."""


def plain_files(
    folder: Path, passed_over: PassedOver, *, without: Collection[str] = ()
) -> Iterator[PurePosixPath]:
    """Yield the plain files below a folder by name; skip links, pipes and devices.

    Also skips sparse files without data, because copying them could fill the disk.

    Args:
        folder: folder to list.
        passed_over: called with each skipped file.
        without: names below `folder` to leave out, including their contents.
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
    """Return the reason why a file cannot be copied; None for a plain file."""
    if stat.S_ISREG(found.st_mode):
        return f"it claims {found.st_size} bytes but contains none" if _is_hollow(found) else None
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return f"it is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}"


def strange_file(database: Path) -> str | None:
    """Return the problem with the files of a database about to be opened; None if there is none.

    TensorStore opens the files without such checks, so it would block on a pipe or follow a link.
    """
    try:
        if database.is_symlink():
            return f"{database.name!r} is a link"
        manifest = _status(database / MANIFEST)
        if manifest is not None:
            if not stat.S_ISREG(manifest.st_mode):
                return f"{MANIFEST!r} is not a plain file"
            if manifest.st_size > _MOST_MANIFEST:
                return f"{MANIFEST!r} is larger than any valid one"
        name = _first_strange(database)
    except OSError as error:
        return f"its files cannot be listed ({error})"
    return None if name is None else f"{name!r} is not a plain file"


def largest_file(database: Path) -> int | None:
    """Return the size of the largest data file in bytes; None if there are too many to check.

    No value can be larger than the largest file, so most runs need no size check per key.
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
    """Return the first entry below a folder, by name, that is not a file or folder."""
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
        # data files have names of 32 hex digits; a folder with such a name is invalid
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
    """Open a plain file below a folder; None if it does not exist."""
    path = folder
    for part in PurePosixPath(name).parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise DamagedRunError(f"{str(path)!r} is a link; a run's files must be in its folder")
    path = folder / name
    found = _status(path)
    if found is None:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise DamagedRunError(f"{str(path)!r} is not a plain file")
    if _is_hollow(found):
        raise DamagedRunError(f"{str(path)!r} claims {found.st_size} bytes but contains none")
    # the file may have been replaced since the first check
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedRunError(f"{str(path)!r} is not a plain file")
    return handle
