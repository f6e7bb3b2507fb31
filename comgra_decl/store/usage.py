"""What writing a run takes of the machine: processor time, and time the training waited."""

from __future__ import annotations

import time
from pathlib import Path

_POOL = "ts_pool_worker"
"""How TensorStore names its threads; they compress and write."""

_TASKS = Path("/proc/self/task")


class Usage:
    """Adds up what the writer takes. Used on the writer thread, but for `waited`."""

    def __init__(self) -> None:
        self.waited = 0.0  # seconds for which the training waited for room in the queue
        self._started = time.monotonic()
        self._pool = 0.0  # processor seconds of TensorStore's threads, also of those that ended
        self._seen = _pool_seconds()
        self._own = 0.0

    def start(self) -> None:
        """Begins to count the processor time of the calling thread, the writer's."""
        self._own = time.thread_time()

    def document(self) -> dict[str, float]:
        """Returns the sums so far, in seconds.

        `cpu`: processor time of the writer thread and of TensorStore's threads, which work for it
        unless the program uses TensorStore itself; `wall`: time since the start; `share`: cpu /
        wall, 1 being a whole core; `waited`: for which the training waited. Where the system
        does not tell the time of threads (not Linux), that of the writer thread alone.
        """
        now = _pool_seconds()
        self._pool += sum(max(0.0, spent - self._seen.get(t, 0.0)) for t, spent in now.items())
        self._seen = now
        wall = time.monotonic() - self._started
        cpu = time.thread_time() - self._own + self._pool
        numbers = {"cpu": cpu, "wall": wall, "share": cpu / max(wall, 1e-9), "waited": self.waited}
        return {name: round(number, 4) for name, number in numbers.items()}


def _pool_seconds() -> dict[str, float]:
    """Returns the processor seconds of TensorStore's threads that are alive, by thread."""
    spent = {}
    try:
        for task in _TASKS.iterdir():
            if (task / "comm").read_text().startswith(_POOL):
                spent[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # a thread ended meanwhile, or no such files
        return spent
    return spent
