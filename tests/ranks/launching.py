"""Starts the ranks of a training as processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    """A port on which the ranks can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank."""
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
    """Runs `python ARGUMENTS` once for each rank; returns exit code and output of each."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment(rank, world_size, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]
