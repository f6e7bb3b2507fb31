"""Describe what the worker processes of a program's data loaders are doing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from comgra_decl.hooks.memory_use import page_size
from comgra_decl.hooks.objects import unfrozen_of

_PROCESSES = Path("/proc")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
_MOST = 16  # workers per loader
_MOST_BATCHES = 8


def loader_workers() -> list[str]:
    """Return lines about the workers of all data loaders that have workers.

    They are read from the loaders and from `/proc`, without asking the workers, and without
    collecting those that have ended, which torch must notice itself.
    """
    torch_loader = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(torch_loader, "_MultiProcessingDataLoaderIter", None)
    lines: list[str] = []
    for loader in [] if kind is None else unfrozen_of((kind,)):
        try:
            lines += _of_loader(loader)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            continue  # it is being constructed or has changed meanwhile
    return lines


def _of_loader(loader: Any) -> list[str]:
    tasks = dict(loader._task_info)
    wanted = tasks.get(loader._rcvd_idx)
    awaited = f"; batch {loader._rcvd_idx} is from worker {wanted[0]}" if wanted else ""
    lines = [f"DataLoader of {type(loader._dataset).__name__}, workers{awaited}:"]
    for number, worker in [*enumerate(loader._workers)][:_MOST]:
        # an entry of a batch that has arrived too early also contains the batch
        due = [str(batch) for batch, task in sorted(tasks.items()) if task == (number,)]
        batches = ", ".join(due[:_MOST_BATCHES])
        asked = f"has still to deliver batches {batches}" if due else "has delivered all batches"
        lines.append(f"  worker {number}, process {worker.pid}: {_state(worker.pid)}; {asked}")
    return lines


def _state(process: int) -> str:
    """Return the state of a process, its CPU time and its memory; as far as the system tells."""
    try:
        fields = (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel
        memory = int(fields[21]) * page_size()
        state, seconds = _STATES.get(fields[0], fields[0]), ticks / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return "gone" if (_PROCESSES / "self").exists() else "state unknown"
    except (OSError, ValueError, IndexError):
        return "state unknown"
    if state == "ended":
        return state
    return f"{state}, {seconds:.1f} s of CPU time, {memory / 2**20:.0f} MiB"
