"""Determine the rank of this process, and the folder that all ranks of a training job share.

No communication is involved. The rank is read from torch.distributed or from the environment. The
ranks agree on a folder through small files that the first of them creates.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comgra_decl.store.location import Location

RANKS = "ranks"
"""The folder within a run that contains a folder for each recorded rank except the first."""

_CLAIMS = ".ranks"
_LATEST = 1800.0
"""Seconds after which a rank no longer joins a launch; the same as gloo's default timeout."""
_FORGOTTEN = 86400.0
"""Seconds after which the files of a launch are deleted."""

_RUN_ID, _RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun: the name of the job, and how often it has restarted its processes."""

_LAUNCH = (
    _RUN_ID,
    _RESTARTS,
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PBS_JOBID",
    "LSB_JOBID",
)
"""Environment variables that the ranks of one launch have in common."""


@dataclass(frozen=True)
class Rank:
    """One of several processes that train together."""

    number: int
    world_size: int


def current_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank of this process; None if it trains alone or the rank is not known yet.

    Uses torch.distributed if the program has initialised it. Otherwise, uses the environment
    variables set by torchrun, Ray Train, MPI, SLURM's `srun` or Lightning. Lightning's processes
    have only `LOCAL_RANK`. The tasks of `srun` may also be independent programs, so they count as
    ranks only if they have a `MASTER_ADDR`.
    """
    return _of_torch() or _of_environment(environment)


def _of_torch() -> Rank | None:
    """Return the rank from torch.distributed, using only calls that do not wait for other ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _several(distributed.get_rank(), distributed.get_world_size())


def _of_environment(environment: Mapping[str, str]) -> Rank | None:
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *([("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")] if "MASTER_ADDR" in environment else []),
    ):
        if rank in environment and size in environment:
            return _several(environment[rank], environment[size])
    if environment.get("NODE_RANK") == "0" and "WORLD_SIZE" in environment:
        return _several(environment.get("LOCAL_RANK", ""), environment["WORLD_SIZE"])
    return None


def _several(rank: str | int, size: str | int) -> Rank | None:
    try:
        number, world_size = int(rank), int(size)
    except ValueError:
        return None
    return Rank(number, world_size) if 0 <= number < world_size and world_size > 1 else None


def rank_folder(run: Location, rank: int, recorded: list[int]) -> Location:
    """Return the folder of a rank's database; for the first recorded rank, the run's folder."""
    return run if rank == recorded[0] else run / RANKS / str(rank)


# -- agreeing on a folder ------------------------------------------------------------------------


def agreed_folder(group: Path, rank: Rank, new: Callable[[], Path], launch: str = "") -> Path:
    """Return the run's folder that all ranks of this launch share.

    The first rank to arrive creates the folder and publishes its name in a claim file, which the
    others read. A rank first waits a short time for lower ranks to arrive. Claims from earlier
    launches are skipped. These are claims that this rank has already joined, that a dead process
    has made, or that are too old. The number of files that a rank reads does not depend on the
    number of ranks, because a thousand of them may begin at once on a network file system.

    Args:
        group: the folder of the runs.
        rank: the rank of this process.
        new: creates a folder for a new run, or returns one that this process has created.
        launch: anything else that the ranks of a launch share, such as the requested name.

    Raises:
        OSError: the folder cannot be written.
    """
    claims = group / _CLAIMS
    claims.mkdir(parents=True, exist_ok=True)
    stem = _launch_name(rank, launch)
    for number in count():
        claim = claims / f"{stem}.{number}.json"
        if not _appears(claim, within=_head_start(rank)):
            _claim(claim, new, claims / _job_name(rank, launch))
        content = _read(claim)
        if not _stale(content) and _join(claims, claim.stem, rank):
            return group / Path(str(content["run"])).name
    raise AssertionError("numbers do not run out")


def restarted_folder(group: Path, rank: Rank | None, launch: str = "") -> Path | None:
    """Return the run's folder of the attempt that torchrun has restarted; None without one.

    The attempts of a job are launches of their own, whose ports may differ. The latest one of each
    job is therefore kept in a file that is named by the job and the number of its ranks.

    Args:
        group: the folder of the runs.
        rank: the rank of this process.
        launch: as for `agreed_folder`.
    """
    if rank is None or os.environ.get(_RESTARTS, "0") == "0":
        return None
    name = _read(group / _CLAIMS / _job_name(rank, launch)).get("run")
    return group / Path(name).name if isinstance(name, str) else None


def _job_name(rank: Rank, launch: str) -> str:
    """Return the name of the file with the latest attempt of a job."""
    parts: dict[str, Any] = {_RUN_ID: os.environ.get(_RUN_ID), "world_size": rank.world_size}
    if parts[_RUN_ID] in (None, "none"):  # torchrun's default for a single node
        parts |= {key: os.environ.get(key) for key in ("MASTER_ADDR", "MASTER_PORT")}
    text = json.dumps(parts | {"asked": launch}, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.job"


def _launch_name(rank: Rank, launch: str) -> str:
    """Return an identifier of the launch that its ranks share and no other launch has."""
    parts: dict[str, Any] = {key: os.environ.get(key) for key in _LAUNCH}
    parts |= {"world_size": rank.world_size, "asked": launch}
    address = os.environ.get("MASTER_ADDR", "")
    if not address or address == "localhost" or address.startswith("127.") or address == "::1":
        parts["machine"] = socket.gethostname()
    if "MASTER_PORT" not in os.environ:  # nothing else distinguishes two launches
        parts["parent"] = os.getppid()
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _head_start(rank: Rank) -> float:
    """Return how many seconds to wait for lower ranks to create the folder; makes races rare."""
    return 0.0 if rank.number == 0 else 0.5 + 0.05 * min(rank.number, 20)


def _appears(path: Path, *, within: float) -> bool:
    end = time.monotonic() + within
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def _claim(claim: Path, new: Callable[[], Path], job: Path) -> None:
    """Create a run's folder for the ranks of this launch, unless another rank is faster."""
    from comgra_decl.store.meta import writer_identity

    folder = new()
    content = {"run": folder.name, "time": time.time(), "writer": writer_identity()}
    if _publish(claim, content):
        _forget(claim.parent)
        draft = job.with_name(f"{job.name}.{socket.gethostname()}.{os.getpid()}.new")
        draft.write_text(json.dumps({"run": folder.name}))
        draft.replace(job)
        return
    with suppress(OSError):
        folder.rmdir()  # fails, and keeps the folder, if it is in use and not empty


def _join(claims: Path, stem: str, rank: Rank) -> bool:
    """Join a launch as this rank; return False if this rank has already joined."""
    from comgra_decl.store.meta import writer_identity

    return _publish(claims / f"{stem}.rank{rank.number}", writer_identity())


def _publish(path: Path, content: Mapping[str, Any]) -> bool:
    """Create a file atomically with its content; return False if it already exists."""
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.new")
    text = json.dumps(content)
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links: a reader may see incomplete content, which counts as stale
        with suppress(FileExistsError):
            with path.open("x") as file:
                file.write(text)
            return True
        return False
    finally:
        draft.unlink()
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _stale(content: Mapping[str, Any]) -> bool:
    from comgra_decl.store.meta import writer_alive

    made, writer = content.get("time"), content.get("writer")
    if "run" not in content or not isinstance(made, float) or time.time() - made > _LATEST:
        return True
    return not isinstance(writer, dict) or not writer_alive(writer, last_commit=made)


def _forget(claims: Path) -> None:
    """Delete the files of launches that ended long ago."""
    for path in claims.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN:
                path.unlink()
