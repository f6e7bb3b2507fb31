"""Lists the runs below a folder, whatever state they are in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from comgra_decl.errors import ComgraError, FormatError, RunNotFoundError, StoreError
from comgra_decl.store.location import Location, Remote, Where, location

from .opening import run_folders
from .ranks.reader import open_reader

_AT_ONCE = 16
"""Runs of a bucket that are opened side by side."""


@dataclass(frozen=True)
class RunSummary:
    """One run of a list; `path` is its folder, or a `Remote` where it lies in a bucket.

    `state` is "waiting", "live", "finished", "stopped" or, where `error` says why it cannot be
    read, "damaged" or "unreadable" (a newer format). `records` and `last_step` (of training, None
    if there is none yet) are as of now, `started` is in unix seconds.
    """

    path: Location
    group: str
    name: str
    state: str
    records: int
    last_step: int | None
    started: float | None
    error: str | None


def list_runs(root: Where) -> list[RunSummary]:
    """Lists the runs at or below a folder or a place in a bucket, oldest first.

    A run that cannot be read is listed with the reason; a folder that does not exist has no runs.
    In a bucket all names below the place are looked at, in a request for each thousand.

    Raises:
        StoreError: a bucket cannot be reached.
    """
    place = location(root)
    paths = list(run_folders(place))
    if isinstance(place, Remote):  # each run takes several requests, one after another
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(_summary, paths))
    else:
        found = [_summary(path) for path in paths]
    there = [summary for summary in found if summary is not None]
    return sorted(there, key=lambda run: (run.started or 0.0, str(run.path)))


def _summary(path: Location) -> RunSummary | None:
    try:
        reader = open_reader(path)
        head = reader.head
        return RunSummary(
            path=path,
            group=path.absolute().parent.name,
            name=path.absolute().name,
            state=reader.state,
            records=int(head["n"]),
            last_step=head["step"],
            started=reader.meta.started,
            error=head.get("error"),
        )
    except RunNotFoundError:
        return None  # being created this moment
    except StoreError:  # a bucket cannot be reached: nothing is known of its runs
        raise
    except ComgraError as error:
        state = "unreadable" if isinstance(error, FormatError) else "damaged"
        return _broken(path, state, str(error))
    except (KeyError, TypeError, ValueError, OSError) as error:
        return _broken(path, "damaged", f"{type(error).__name__}: {error}")


def _broken(path: Location, state: str, reason: str) -> RunSummary:
    where = path.absolute()
    started: float | None = None
    if not isinstance(where, Remote):
        with suppress(OSError):
            started = where.stat().st_mtime
    return RunSummary(path, where.parent.name, where.name, state, 0, None, started, reason)
