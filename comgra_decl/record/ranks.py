"""Which rank of a distributed training this process is, and where such a training is stored.

Nothing here communicates: a rank is read from the environment or from what the program has told
torch.distributed, and ranks agree on a folder through small files that whoever comes first makes.
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
"""Folder within a run that holds a folder for each rank but the first recorded one."""

_CLAIMS = ".ranks"
_LATEST = 1800.0
"""Seconds after which a rank is no longer taken for one of a launch; gloo gives up by then, too."""
_FORGOTTEN = 86400.0
"""Seconds after which the files by which ranks found each other are taken away."""

_LAUNCH = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
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
    """One process of several that train together."""

    number: int
    world_size: int


def current_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Returns what this process is as far as is known now; None if it is alone, or does not say.

    torch.distributed is asked first, once the program has initialised it, then the variables of
    torchrun (also of Lightning's processes, which have `LOCAL_RANK` only) and of MPI.
    """
    return _of_torch() or _of_environment(environment)


def _of_torch() -> Rank | None:
    """These calls are local: none of them waits for another process."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _several(distributed.get_rank(), distributed.get_world_size())


def _of_environment(environment: Mapping[str, str]) -> Rank | None:
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
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
    """Returns where a rank's database is: the first recorded rank's is the run's folder itself."""
    return run if rank == recorded[0] else run / RANKS / str(rank)


# -- agreeing on a folder ------------------------------------------------------------------------


def agreed_folder(group: Path, rank: Rank, new: Callable[[], Path], launch: str = "") -> Path:
    """Returns the run's folder that all ranks of this launch use.

    The first one to come makes it and says so in a file; the others read that. A rank gives those
    before it a short time to be first. A claim of a launch that is over is passed by: the rank is
    in it already, a process of it has died, or it is too old.

    Args:
        group: folder of the runs.
        rank: who asks.
        new: makes a folder for a new run, or returns one that this process has made.
        launch: what else the ranks of a launch have in common, such as the name they ask for.

    Raises:
        OSError: the folder cannot be written.
    """
    claims = group / _CLAIMS
    claims.mkdir(parents=True, exist_ok=True)
    _forget(claims)
    stem = _launch_name(rank, launch)
    for number in count():
        claim = claims / f"{stem}.{number}.json"
        if not _appears(claim, within=_head_start(rank)):
            _claim(claim, new)
        content = _read(claim)
        if not _stale(claims, claim.stem, content) and _join(claims, claim.stem, rank):
            return group / Path(str(content["run"])).name
    raise AssertionError("numbers do not run out")


def _launch_name(rank: Rank, launch: str) -> str:
    """Names the launch by what its ranks have in common and others, at the same time, have not."""
    parts: dict[str, Any] = {key: os.environ.get(key) for key in _LAUNCH}
    parts |= {"world_size": rank.world_size, "asked": launch}
    address = os.environ.get("MASTER_ADDR", "")
    if not address or address == "localhost" or address.startswith("127.") or address == "::1":
        parts["machine"] = socket.gethostname()
    if "MASTER_PORT" not in os.environ:  # nothing else tells two launches apart
        parts["parent"] = os.getppid()
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _head_start(rank: Rank) -> float:
    """Seconds that ranks before this one have to make the folder, so that they rarely race."""
    return 0.0 if rank.number == 0 else 0.5 + 0.05 * min(rank.number, 20)


def _appears(path: Path, *, within: float) -> bool:
    end = time.monotonic() + within
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


def _claim(claim: Path, new: Callable[[], Path]) -> None:
    folder = new()
    content = {"run": folder.name, "time": time.time()}
    if not _publish(claim, content):  # another rank was quicker
        with suppress(OSError):
            folder.rmdir()  # ours is empty, or it is in use and stays


def _join(claims: Path, stem: str, rank: Rank) -> bool:
    """Takes this rank's place in a launch; False if it is taken."""
    from comgra_decl.store.meta import writer_identity

    return _publish(claims / f"{stem}.rank{rank.number}", writer_identity())


def _publish(path: Path, content: Mapping[str, Any]) -> bool:
    """Makes a file appear with all its content; False if there is one."""
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.new")
    text = json.dumps(content)
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links here: a reader in between takes it for stale
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


def _stale(claims: Path, stem: str, content: Mapping[str, Any]) -> bool:
    from comgra_decl.store.meta import writer_alive

    made = content.get("time")
    if "run" not in content or not isinstance(made, float) or time.time() - made > _LATEST:
        return True
    members = [_read(path) for path in claims.glob(f"{stem}.rank*") if path.suffix != ".new"]
    return any(not writer_alive(member, last_commit=made) for member in members)


def _forget(claims: Path) -> None:
    """Takes away what ranks of long ago have left here."""
    for path in claims.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FORGOTTEN:
                path.unlink()
