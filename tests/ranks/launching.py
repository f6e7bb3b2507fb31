"""Starts the ranks of a training job as separate processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked import Program


def free_port() -> int:
    """Returns a port on which the ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment that torchrun would set for a rank."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(
    *arguments: str | Path,
    world_size: int = 2,
    timeout: float = 240,
    cwd: Path | None = None,
    names: Mapping[str, str] | None = None,
) -> list[tuple[int, str]]:
    """Runs `python ARGUMENTS` once per rank; returns the exit code and output of each.

    Args:
        arguments: those of Python.
        world_size: the number of ranks.
        timeout: seconds until they are killed.
        cwd: their working directory.
        names: what another starter than torchrun calls RANK, LOCAL_RANK and WORLD_SIZE; those that
            it lacks are not set.
    """
    port = free_port()
    environments = [environment(rank, world_size, port) for rank in range(world_size)]
    if names is not None:
        for each in environments:
            own = {name: each.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
            each |= {names[name]: value for name, value in own.items() if name in names}
    programs = [Program(cwd or Path.cwd(), *arguments, env=env) for env in environments]
    try:
        ends = [program.ended(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(end.returncode, end.stdout + end.stderr) for end in ends]
