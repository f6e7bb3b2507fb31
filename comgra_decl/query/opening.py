"""Finds the run that a path means."""

from __future__ import annotations

import os
from collections.abc import Iterator

from comgra_decl.errors import ComgraError, RunNotFoundError, near_paths
from comgra_decl.store.database import database_exists
from comgra_decl.store.layout import DATABASE
from comgra_decl.store.location import Location, Remote, Where, location
from comgra_decl.store.remote import databases_within

from .ranks import RANKS, is_rank, rank_paths
from .run import Run

_DEPTH = 3  # root/group/run, and one more for jobs of a sweep


def open_run(path: Where) -> Run:
    """Opens a run, live or finished.

    Args:
        path: a run's folder, or its place in a bucket (`s3://bucket/runs/train/first`); a group
            or a root gives the newest run in it.

    Raises:
        RunNotFoundError: there is no run.
        DamagedRunError: the run cannot be read; names the key and the reason.
        FormatError: the run was written in a newer format.
        StoreError: it is in a bucket that cannot be reached.
    """
    folder = location(path)
    if folder.name == DATABASE:
        folder = folder.absolute().parent
    if is_run(folder):
        return Run(folder)
    newest: Run | None = None
    failure: ComgraError | None = None
    for candidate in run_folders(folder):
        try:
            run = Run(candidate)
        except ComgraError as error:
            failure = error
            continue
        if newest is None or run.started > newest.started:
            newest = run
    if newest is None:
        require_folder(folder)
        if not isinstance(folder, Remote) and (folder / DATABASE).is_symlink():
            raise RunNotFoundError(
                f"{str(folder / DATABASE)!r} is a link, which is not followed: a run is what its "
                "own folder holds. Pass the folder that the link points to, or copy the run."
            )
        raise failure or RunNotFoundError(
            f"there is no run in {str(folder)!r}: neither it nor a folder below it holds a "
            "'trace.ocdbt'. Pass a run's folder, or the folder that holds the runs."
        )
    return newest


def require_folder(folder: Location) -> None:
    """Says what is wrong with a path that is no folder, or one that may not be read.

    Raises:
        RunNotFoundError: it is missing (names near ones), a file, or closed to this user.
    """
    if isinstance(folder, Remote):
        return
    try:
        with os.scandir(folder):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise RunNotFoundError(
            f"{str(folder)!r} cannot be read: {error.strerror}. Pass a folder that you may read."
        ) from None
    if folder.exists():
        raise RunNotFoundError(
            f"{str(folder)!r} is a file. Pass a run's folder, or the folder that holds the runs."
        )
    if folder.is_symlink():
        raise RunNotFoundError(
            f"{str(folder)!r} is a link to {str(folder.readlink())!r}, which does not exist."
        )
    raise RunNotFoundError(f"{str(folder)!r} does not exist{near_paths(folder) or '.'}")


def run_folders(root: Location, depth: int = _DEPTH) -> Iterator[Location]:
    """Yields the run folders at or below `root`, by name; unreadable folders are passed over.

    In a bucket, which has no folders, all names below `root` are looked at.
    """
    if isinstance(root, Remote):
        yield from _run_places(root, depth)
        return
    if is_run(root):
        yield root
        return
    if depth == 0:
        return
    try:
        children = sorted(entry.name for entry in os.scandir(root) if _is_folder(entry))
    except OSError:
        return
    for name in children:
        yield from run_folders(root / name, depth - 1)


def _run_places(root: Remote, depth: int) -> Iterator[Remote]:
    if is_run(root):
        yield root
        return
    found: dict[Remote, None] = {}
    for place in databases_within(root):
        of_rank = place.parent.name == RANKS and is_rank(place.name)
        found[place.parent.parent if of_rank else place] = None
    yield from (run for run in found if len(run.relative_to(root).parts) <= depth)


def is_run(folder: Location) -> bool:
    """Whether the folder holds a run: its database, or that of a rank but the first."""
    if database_exists(folder):
        return True
    if isinstance(folder, Remote):
        return False  # its ranks are found by listing
    return (folder / RANKS).is_dir() and bool(rank_paths(folder))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Links are not followed: they could lead out of the folder, or round in circles."""
    try:
        return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
    except OSError:
        return False
