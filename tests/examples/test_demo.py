"""`make demo` prints its address, serves the viewer during training, and cleans up at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest

import comgra_decl as comgra
from tests.examples.conftest import EXAMPLES

DEMO = EXAMPLES / "demo.py"
PATIENCE = 120.0


class RunningDemo:
    """A running demo and its output."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for screen in ("DISPLAY", "WAYLAND_DISPLAY"):
            environment.pop(screen, None)
        self.runs = folder
        self.process = subprocess.Popen(
            [sys.executable, str(DEMO), "--runs", str(folder), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.printed: list[str] = []
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self.process.stdout.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Returns the match on the first line that matches the pattern."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                self.printed.append(self._lines.get(timeout=0.2))
            except Empty:
                assert self._reader.is_alive(), self.output
                continue
            if found := re.search(pattern, self.printed[-1]):
                return found
        raise AssertionError(f"{pattern!r} was never printed:\n{self.output}")

    def read_to_the_end(self) -> str:
        """Returns the complete output once the demo has ended."""
        self._reader.join()
        while not self._lines.empty():
            self.printed.append(self._lines.get())
        return self.output

    @property
    def output(self) -> str:
        return "".join(self.printed)

    def children(self) -> set[int]:
        """Process ids of everything that the demo has started, directly or indirectly."""
        return descendants(self.process.pid)

    def kill(self) -> None:
        """Ends the processes that a failing test has left behind."""
        for pid in (self.process.pid, *self.children()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()


def descendants(pid: int) -> set[int]:
    """Returns the ids of all descendants of process `pid`."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    lines = (line.split() for line in listed.stdout.splitlines())
    parents = {int(process): int(parent) for process, parent in lines}
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(listed.stdout.strip()) and not listed.stdout.startswith("Z")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[RunningDemo]:
    running = RunningDemo(tmp_path, "steps=100000", "task.eval_size=8")
    yield running
    running.kill()


def fetch(address: str) -> str:
    """Returns a page from the demo's server."""
    with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
def test_the_viewer_answers_while_the_training_runs_and_ctrl_c_ends_both(
    demo: RunningDemo,
) -> None:
    address = demo.wait_for(r"http://127\.0\.0\.1:\d+\S*").group(0)
    assert "<html" in fetch(address).lower()
    demo.wait_for(r"step +200 ")
    started = demo.children()
    assert len(started) >= 2

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(timeout=30) == 0
    assert not [pid for pid in started if alive(pid)]
    said = demo.read_to_the_end()
    assert "recorded runs are kept in" in said
    assert "Traceback" not in said

    run = comgra.open_run(demo.runs)
    assert run.state == "finished"
    assert len(run.steps) > 10
