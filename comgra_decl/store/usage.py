"""Measure the cost of writing a run: CPU time, and how long training waited."""

from __future__ import annotations

import time
from pathlib import Path

_POOL = "ts_pool_worker"
"""Name prefix of TensorStore's threads, which compress and write."""

_TASKS = Path("/proc/self/task")


class Usage:
    """Accumulates the cost of writing. Must be used on the writer thread, except for `waited`."""

    def __init__(self) -> None:
        self.waited = 0.0  # seconds that training waited for space in the queue
        self._started = time.monotonic()
        self._pool = 0.0  # CPU seconds of TensorStore's threads, including threads that have ended
        self._seen = _pool_seconds()
        self._own = 0.0

    def start(self) -> None:
        """Start counting the CPU time of the calling thread, which must be the writer thread."""
        self._own = time.thread_time()

    def document(self) -> dict[str, float]:
        """Return the totals so far, in seconds.

        `cpu`: CPU time of the writer thread and of TensorStore's threads, including any use of
        TensorStore by the program itself. `wall`: time since the start. `share`: cpu / wall, where
        1 is a whole core. `waited`: how long training waited. On systems without per-thread times
        (not Linux), `cpu` covers the writer thread only.
        """
        now = _pool_seconds()
        self._pool += sum(max(0.0, spent - self._seen.get(t, 0.0)) for t, spent in now.items())
        self._seen = now
        wall = time.monotonic() - self._started
        cpu = time.thread_time() - self._own + self._pool
        numbers = {"cpu": cpu, "wall": wall, "share": cpu / max(wall, 1e-9), "waited": self.waited}
        return {name: round(number, 4) for name, number in numbers.items()}


def _pool_seconds() -> dict[str, float]:
    """Return the CPU seconds of TensorStore's live threads, by thread."""
    spent = {}
    try:
        for task in _TASKS.iterdir():
            if (task / "comm").read_text().startswith(_POOL):
                spent[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # a thread just ended, or there is no /proc
        return spent
    return spent
