"""Run the viewer in a separate process and measure its memory."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVE = "import sys; from comgra_decl.viewer.serve import serve; serve(sys.argv[1])"
_PATIENCE = 60  # seconds


@dataclass(frozen=True)
class Served:
    """A running viewer."""

    url: str
    pid: int

    def memory(self) -> float:
        """Return the resident memory of the server in MB."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@contextmanager
def served(root: Path) -> Iterator[Served]:
    """Serve the runs below `root` until the context exits."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    pipe = process.stdout

    def read() -> None:
        for line in pipe:
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    try:
        url = ""
        while "http://" not in url:
            url = lines.get(timeout=_PATIENCE)
        yield Served(url.split("viewer: ", 1)[1].strip(), process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
