"""Find and open the run at a path."""

from __future__ import annotations

import os
from contextlib import suppress

from comgra_decl.errors import ComgraError, RunNotFoundError, near_paths
from comgra_decl.store.layout import DATABASE
from comgra_decl.store.location import Location, Remote, Where, location

from .index import Index
from .listing import RunSummary, is_run, listed
from .run import Run


def open_run(path: Where) -> Run:
    """Open a run, live or finished.

    Args:
        path: a run's folder, or its location in a bucket (`s3://bucket/runs/train/first`). If the
            path is a group or a root, the newest run in it is opened.

    Raises:
        RunNotFoundError: there is no run at the path.
        DamagedRunError: the run cannot be read; the message names the key and the reason.
        FormatError: the run was written in a newer format.
        StoreError: the run is in a bucket that cannot be reached.
    """
    folder = location(path)
    if folder.name == DATABASE:
        folder = folder.absolute().parent
    if isinstance(folder, Remote):  # each question is a request
        with suppress(RunNotFoundError):
            return Run(folder)
    elif is_run(folder):
        return Run(folder)
    index = Index(folder)
    failure: ComgraError | None = None
    for summary in sorted(listed(index), key=_by_age):
        try:
            return Run(summary.path)
        except ComgraError as error:
            failure = error
    if failure is not None:
        raise failure
    if index.creating:
        raise RunNotFoundError(index.creating[-1])
    require_folder(folder)
    if not isinstance(folder, Remote) and (folder / DATABASE).is_symlink():
        raise RunNotFoundError(
            f"{str(folder / DATABASE)!r} is a link, and links are not followed: a run must "
            "be in its own folder. Pass the folder that the link points to, or copy the run."
        )
    if index.cut:
        raise RunNotFoundError(f"no run found in {str(folder)!r}: {index.cut}")
    raise RunNotFoundError(
        f"there is no run in {str(folder)!r}: neither it nor any folder below it contains a "
        "'trace.ocdbt'. Pass a run's folder, or the folder that holds the runs."
    )


def _by_age(summary: RunSummary) -> tuple[bool, float]:
    """Sort readable runs before others, and the newest first."""
    return summary.state in ("damaged", "unreadable"), -(summary.started or 0.0)


def require_folder(folder: Location) -> None:
    """Raise an error if a path is not a readable folder.

    Raises:
        RunNotFoundError: the path is missing (suggests similar names), a file, or not readable.
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
            f"{str(folder)!r} cannot be read: {error.strerror}. Pass a readable folder."
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
