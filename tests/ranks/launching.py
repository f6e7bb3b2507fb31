"""Starts the ranks of a training job as separate processes."""

from __future__ import annotations

import os
import socket
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
    *arguments: str | Path, world_size: int = 2, timeout: float = 240, cwd: Path | None = None
) -> list[tuple[int, str]]:
    """Runs `python ARGUMENTS` once per rank; returns the exit code and output of each."""
    port = free_port()
    programs = [
        Program(cwd or Path.cwd(), *arguments, env=environment(rank, world_size, port))
        for rank in range(world_size)
    ]
    try:
        ends = [program.ended(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [(end.returncode, end.stdout + end.stderr) for end in ends]
