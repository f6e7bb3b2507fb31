"""Time reads of a run in a separate process: `python -m ...reading RUN`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.store.data import memory

if TYPE_CHECKING:
    from comgra_decl.store.view import View


def in_fresh_process(run: Path) -> dict[str, Any]:
    """Return the result of `measure` in a new process, with empty caches."""
    command = [sys.executable, "-m", "benchmarks.store.reading", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(run: Path) -> dict[str, Any]:
    """Return the milliseconds of first and later reads of every kind, and the memory used."""
    from comgra_decl.store import Reader
    from comgra_decl.store.database import new_context
    from comgra_decl.store.reader import CACHE_BYTES

    def cold(_: int) -> View:
        """Open the run like a process that has read nothing of it."""
        return Reader(run, context=new_context(cache_bytes=CACHE_BYTES, copy_threads=2)).view

    Reader(run).poll()  # excludes imports and the start of TensorStore's threads
    opened = _times(20, cold)
    view = Reader(run).view
    before = memory("VmRSS")
    rng = np.random.default_rng(0)
    records, slots = rng.integers(0, view.n, 200), rng.integers(0, len(view.slots), 200)
    columns = rng.integers(0, 27, 200)
    reads: dict[str, tuple[int, Callable[[int], Any]]] = {
        "series": (20, lambda i: view.series("agg", int(slots[i]), int(columns[i]))),
        "sample series": (
            20,
            lambda i: view.series("smp", int(slots[i]), i % 2, int(columns[i]) % 9),
        ),
        "cell": (200, lambda i: view.row("agg", int(records[i]), int(slots[i]), int(columns[i]))),
        "step": (100, lambda i: view.row("agg", int(records[i]))),
        "heat map": (27, lambda i: view.heat("agg", i)),
    }
    times = {name: _times(*read) for name, read in reads.items()}
    held = [before]
    for rounds in (2, 4):
        for column in list(range(27)) * rounds:
            view.heat("agg", column)
        held.append(memory("VmRSS"))
    return {"open": opened, "reads": times, "memory": held}


def _times(count: int, read: Callable[[int], Any]) -> dict[str, float]:
    spent = []
    for turn in range(count):
        start = time.perf_counter()
        read(turn)
        spent.append(1e3 * (time.perf_counter() - start))
    median, high = np.quantile(spent, (0.5, 0.95)).tolist()
    return {"first": spent[0], "median": median, "p95": high, "worst": max(spent)}


if __name__ == "__main__":
    json.dump(measure(Path(sys.argv[1])), sys.stdout)
