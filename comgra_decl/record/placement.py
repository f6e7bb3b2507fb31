"""Choose and create the folder of a new run, `<root>/<group>/<name>`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from comgra_decl.errors import ComgraError, SpecError, StoreError
from comgra_decl.record.mesh import recorded_ranks, waits_for_mesh
from comgra_decl.record.ranks import Rank, agreed_folder, rank_folder, restarted_folder

if TYPE_CHECKING:
    from comgra_decl.record.context import RunContext
    from comgra_decl.spec.run import RunSpec
    from comgra_decl.store.location import Location, Remote

SPEC_FILE = "spec.yaml"
"""The name of the spec file in a run's folder."""

DEFAULT_GROUP = "default"
"""The group to use if neither the spec nor the program names one."""


@dataclass(frozen=True)
class Place:
    """The location where this process records.

    Attributes:
        run: the run's folder, or its location in a bucket.
        path: the folder or location of the process's own database, which is the run's or within it.
        rank: the rank of the process; None if it trains alone.
        recorded: the ranks that are recorded; empty if it trains alone.
    """

    run: Location
    path: Location
    rank: Rank | None = None
    recorded: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether the database is in the run's folder itself."""
        return self.path == self.run

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts that a reader needs to join the ranks; None if there is one process."""
        if self.rank is None:
            return None
        return {
            "rank": self.rank.number,
            "world_size": self.rank.world_size,
            "recorded": list(self.recorded),
            "run": self.run.name,  # the original name, kept by renamed runs and copies
        }


def create_run_folder(run: RunSpec, context: RunContext) -> Path:
    """Create the local folder of a new single-process run; see `place_run`."""
    place = place_run(run, context, rank=None).path
    assert isinstance(place, Path), f"{place} is in a bucket"
    return place


def place_run(
    run: RunSpec, context: RunContext, *, rank: Rank | None, own: Location | None = None
) -> Place:
    """Create the folder of a new run, or find the one created by the other ranks.

    If a name is taken, a number is appended, as in "baseline-2". Creating the folder claims its
    name, so programs that start at the same time never share a folder, unless they are ranks of the
    same training job.

    Args:
        run: the part of the spec that sets the location.
        context: how the program was started.
        rank: the rank of this process; None if it trains alone.
        own: a folder that this process created before it knew its rank.

    Raises:
        StoreError: the folder cannot be created.
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
            f"cannot create a run in {group} ({error.strerror}); "
            "choose another folder with run.root=FOLDER"
        ) from error


def _place_in_bucket(group: Remote, run: RunSpec, rank: Rank | None, *, late: bool) -> Place:
    """Claim a location in a bucket; the ranks of a run cannot agree on a name there.

    Raises:
        StoreError: a run with ranks has no name or already exists, or this process learned its rank
        too late.
    """
    from comgra_decl.store.database import database_exists
    from comgra_decl.store.remote import Objects

    if rank is not None and (late or run.name is None):
        raise StoreError(
            f"{group} is in a bucket, where the processes of a training job cannot agree on a run. "
            "Name the run (run.name=NAME), and make sure that each process knows its rank before "
            "tracing begins (use torchrun, or call init_process_group first)"
        )
    for name in _candidates(_wanted_name(run)):
        place = group / name
        found = place_of_rank(place, run, rank)
        if found.leads:
            claim = f"# claimed by {uuid4().hex}\n".encode()
            free = not database_exists(place) and Objects(place).claim(SPEC_FILE, claim)
        else:
            free = not database_exists(found.path)
        if free:
            return found
        if rank is not None:
            raise StoreError(f"{place} already contains a run; choose another run.name")
    raise AssertionError("numbers do not run out")


def demand_mesh(run: RunSpec, context: RunContext) -> None:
    """Check that the mesh is declared if the recorded ranks must be known when tracing begins.

    Raises:
        SpecError: it is not.
    """
    if waits_for_mesh(run) and (
        run.resume is not False or not isinstance(run_group(run, context), Path)
    ):
        where = "to resume a run" if run.resume is not False else "in a bucket"
        problem = (
            f"run.ranks: {where}, the recorded ranks must be known when tracing begins, so "
            "`one_per` needs the mesh, such as run.mesh={dp: 2, tp: 4}"
        )
        raise SpecError([problem])


def _wanted_name(run: RunSpec) -> str:
    return run.name or f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def place_of_rank(folder: Location, run: RunSpec, rank: Rank | None) -> Place:
    """Return a rank's place in a run's folder."""
    if rank is None:
        return Place(folder, folder)
    recorded = recorded_ranks(run, rank.world_size) or [rank.number]
    own = rank_folder(folder, rank.number, recorded)
    return Place(folder, own, rank, tuple(recorded))


def resumed_folder(run: RunSpec, context: RunContext, rank: Rank | None) -> Location | None:
    """Return the folder of the run to resume; None for a new run.

    This is the run that the spec names or, if torchrun has restarted the processes of a job, the
    one that they recorded before.

    Args:
        run: the part of the spec that sets the location.
        context: how the program was started.
        rank: the rank of this process; None if it trains alone.

    Raises:
        StoreError: the run does not exist.
    """
    from comgra_decl.query.listing import is_run
    from comgra_decl.store.location import joined

    if run.resume is False:
        group = run_group(run, context)
        before = None
        if isinstance(group, Path):
            before = restarted_folder(group, rank, launch=run.name or "")
        return before if before is not None and is_run(before) else None

    if run.resume is not True:
        folder = joined(context.base, run.resume)
        if not is_run(folder):
            raise StoreError(
                f"there is no run in {folder} to resume; set run.resume to the folder of a run, or "
                "to true for the newest run of the group"
            )
        return folder.resolve() if isinstance(folder, Path) else folder
    group = run_group(run, context)
    if run.name is not None:
        return group / run.name if is_run(group / run.name) else None
    return _newest(group)


def _newest(group: Location) -> Location | None:
    """Return the run that started last, of those that can be read; None if there is none.

    Reads one database of each run. Joining the ranks, as `list_runs` does, needs pandas, which may
    be missing where a program trains.
    """
    from comgra_decl.query.listing import run_folders
    from comgra_decl.query.ranks.reader import rank_paths
    from comgra_decl.store import Reader

    readable = []
    for folder in run_folders(group):
        try:
            reader = Reader(next(iter(rank_paths(folder).values())))
            readable.append((reader.meta.started, str(folder), folder, reader.head))
        except StoreError:
            raise  # the bucket cannot be reached, so it is unknown which run is the newest
        except (ComgraError, KeyError, TypeError, ValueError, OSError, StopIteration):
            continue  # damaged, of a newer format, or currently being created
    return max(readable, key=lambda found: found[:2])[2] if readable else None


def run_group(run: RunSpec, context: RunContext) -> Location:
    """Return the folder in which new runs are created; it may not exist yet."""
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
    """Return the name of a job or script in a form that is valid as a folder name."""
    return re.sub(r"[^\w.+=@-]+", "_", job or "").strip("._")[:100] or DEFAULT_GROUP
