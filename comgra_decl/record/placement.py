"""Where a run is stored: `<root>/<group>/<name>`, never in a folder that is there already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import StoreError
from comgra_decl.record.ranks import Rank, agreed_folder, rank_folder

if TYPE_CHECKING:
    from comgra_decl.record.context import RunContext
    from comgra_decl.spec.run import RunSpec
    from comgra_decl.store.location import Location, Remote

SPEC_FILE = "spec.yaml"
"""The file in a run's folder that holds its spec."""

DEFAULT_GROUP = "default"
"""The group where neither the spec nor the program names one."""


@dataclass(frozen=True)
class Place:
    """Where this process records.

    Attributes:
        run: the run's folder, or its place in a bucket.
        path: the folder (or place) of the process's own database: the run's, or one within it.
        rank: what the process is in a distributed training; None if it trains alone.
        recorded: the ranks that are recorded; empty if it trains alone.
    """

    run: Location
    path: Location
    rank: Rank | None = None
    recorded: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether the database is that of the run's folder itself."""
        return self.path == self.run

    @property
    def facts(self) -> dict[str, Any] | None:
        """What a reader must know to join the ranks; None if there is one process."""
        if self.rank is None:
            return None
        return {
            "rank": self.rank.number,
            "world_size": self.rank.world_size,
            "recorded": list(self.recorded),
            "run": self.run.name,  # as it was made: copies and other names keep it
        }


def create_run_folder(run: RunSpec, context: RunContext) -> Path:
    """Creates the folder of a new run of one process on this machine; see `place_run`."""
    place = place_run(run, context, rank=None).path
    assert isinstance(place, Path), f"{place} is in a bucket"
    return place


def place_run(
    run: RunSpec, context: RunContext, *, rank: Rank | None, own: Location | None = None
) -> Place:
    """Creates the folder of a new run, or finds the one that the other ranks have made.

    A name that is taken gets a number: "baseline-2". Creating is what claims a name, so programs
    that start at the same time never share a folder, unless they are ranks of one training.

    Args:
        run: what the spec says of the place.
        context: how the program was started.
        rank: what this process is; None if it trains alone.
        own: a folder that this process has made before it knew its rank.

    Raises:
        StoreError: it cannot be created.
    """
    group = run_group(run, context)
    if not isinstance(group, Path):
        return _place_in_bucket(group, run, rank, late=own is not None)
    assert own is None or isinstance(own, Path)

    def new() -> Path:
        return own or _claimed(group, _wanted_name(run))

    try:
        group.mkdir(parents=True, exist_ok=True)
        if rank is None:
            folder = new()
            return Place(folder, folder)
        folder = agreed_folder(group, rank, new, launch=run.name or "")
        return place_of_rank(folder, run, rank)
    except OSError as error:
        raise StoreError(
            f"no run can be created in {group} ({error.strerror}); "
            "choose another place with run.root=FOLDER"
        ) from error


def _place_in_bucket(group: Remote, run: RunSpec, rank: Rank | None, *, late: bool) -> Place:
    """Claims a place in a bucket; ranks cannot agree on one there, so it has to be named."""
    from comgra_decl.store.database import database_exists
    from comgra_decl.store.remote import Objects

    if rank is not None and (late or run.name is None):
        raise StoreError(
            f"{group} is in a bucket, where the processes of a training cannot agree on a run. "
            "Give it a name (run.name=NAME), and let each process know its rank when tracing "
            "begins (torchrun, or init_process_group before it)"
        )
    for name in _candidates(_wanted_name(run)):
        place = group / name
        found = place_of_rank(place, run, rank)
        if found.leads:
            free = not database_exists(place) and Objects(place).claim(SPEC_FILE, b"# claimed\n")
        else:
            free = not database_exists(found.path)
        if free:
            return found
        if rank is not None:
            raise StoreError(f"{place} holds a run already; choose another run.name")
    raise AssertionError("numbers do not run out")


def _wanted_name(run: RunSpec) -> str:
    return run.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def place_of_rank(folder: Location, run: RunSpec, rank: Rank | None) -> Place:
    """Returns the place of a rank in a run's folder."""
    if rank is None:
        return Place(folder, folder)
    recorded = run.recorded(rank.world_size) or [rank.number]
    own = rank_folder(folder, rank.number, recorded)
    return Place(folder, own, rank, tuple(recorded))


def resumed_folder(run: RunSpec, context: RunContext) -> Location | None:
    """Returns the folder of the run that the spec says to go on with; None for a new one.

    Raises:
        StoreError: there is no such run.
    """
    if run.resume is False:
        return None
    from comgra_decl.query.listing import list_runs
    from comgra_decl.query.opening import is_run
    from comgra_decl.store.location import joined

    if run.resume is not True:
        folder = joined(context.base, run.resume)
        if not is_run(folder):
            raise StoreError(
                f"there is no run in {folder} to go on with; run.resume is the folder of a run, or "
                "true for the newest one of the group"
            )
        return folder.resolve() if isinstance(folder, Path) else folder
    group = run_group(run, context)
    if run.name is not None:
        return group / run.name if is_run(group / run.name) else None
    readable = [r.path for r in list_runs(group) if r.state not in ("damaged", "unreadable")]
    return readable[-1] if readable else None


def run_group(run: RunSpec, context: RunContext) -> Location:
    """Returns the folder that new runs are made in; it need not be there."""
    from comgra_decl.store.location import joined

    root = joined(context.base, run.root)
    return root / (run.group or folder_name(context.job))


def _claimed(group: Path, name: str) -> Path:
    for candidate in _candidates(name):
        try:
            (group / candidate).mkdir()
        except FileExistsError:
            continue
        return group / candidate
    raise AssertionError("numbers do not run out")


def _candidates(name: str) -> Iterator[str]:
    yield name
    for number in count(2):
        yield f"{name}-{number}"


def folder_name(job: str | None) -> str:
    """Returns the name of a job or script in a form that can name a folder."""
    return re.sub(r"[^\w.+=@-]+", "_", job or "").strip("._")[:100] or DEFAULT_GROUP
