"""List the runs below a folder, whatever their state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from comgra_decl.errors import ComgraError, FormatError, RunNotFoundError, StoreError
from comgra_decl.store.location import Location, Remote, Where, location

from .opening import run_folders
from .ranks.reader import open_reader

_AT_ONCE = 16
"""Maximum number of runs in a bucket that are opened concurrently."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run in a list.

    `path` is its folder, or a `Remote` for a run in a bucket. `state` is "waiting", "live",
    "finished" or "stopped". For a run that cannot be read, it is "damaged" or, if the run has a
    newer format, "unreadable", and `error` gives the reason. `records` and `last_step` (of
    training; None if there is none yet) are current at the time of listing; `started` is in unix
    seconds.
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
    """List the runs at or below a folder or a location in a bucket, oldest first.

    If a run cannot be read, it is listed with the reason. If the folder does not exist, the list is
    empty. In a bucket, all names below the location are listed, with one request per thousand
    names.

    Raises:
        StoreError: the bucket cannot be reached.
    """
    place = location(root)
    paths = list(run_folders(place))
    if isinstance(place, Remote):  # each run takes several consecutive requests
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
        return None  # currently being created
    except StoreError:  # the bucket cannot be reached, so the state of its runs is unknown
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
