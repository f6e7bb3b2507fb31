"""A `panel serve viewer` of its own, and what its tests have in common."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import comgra_decl
from tests.support.fake_run import FakeRun
from tests.viewer.conftest import HARMLESS

VIEWER = Path(comgra_decl.__file__).parent / "viewer"
REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE = 60  # seconds for a server to start, on a busy machine

Start = Callable[..., str]
CODE = "from comgra_decl.launch.cli import main; main()"

VIEWS = """
from comgra_decl.viewer.custom import View
def views():
    return [View("Where", lambda look: f"it is **{look.node}** at {look.step}"), View("Bad", len)]
"""


class Server:
    """A `panel serve viewer` in a process of its own."""

    def __init__(self, root: Path, log: Path, *more: str) -> None:
        self.root, self.log = root, log
        command = [sys.executable, "-m", "panel", "serve", str(VIEWER), "--port", "0"]
        command += ["--address", "127.0.0.1", "--args", str(root), *more]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.url = announced(log, r"app running at: (http://127\.0\.0\.1:\d+/viewer)")

    def stop(self) -> None:
        """Ends the server; fails if it logged an error."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)
        blocks = self.log.read_text().split("Task exception was never retrieved")
        errors = [b for b in blocks if "Traceback" in b and not HARMLESS.search(b)]
        errors += [line for line in self.log.read_text().splitlines() if " ERROR" in line]
        assert not errors, "the server logged errors:\n" + "\n".join(errors)


class Viewed:
    """A `comgra-decl view` in a process of its own.

    Attributes:
        url: The address that it said.
        log: What it writes to the standard error.
    """

    def __init__(self, root: Path, log: Path, *more: str, **environment: str) -> None:
        self.log = log
        command = [sys.executable, "-c", CODE, "view", str(root), "--port", "0", "--no-show", *more]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=PIPE, stderr=out, text=True, env={**os.environ, **environment}
            )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:
            self.process.stdout.close()
            raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.said}")
        self.url = words[-1]

    @property
    def said(self) -> str:
        """What stands in the log."""
        return self.log.read_text()

    def stop(self) -> None:
        """Ends the server; fails if it logged a traceback."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert "Traceback" not in self.said, self.said


class Gallery(Server):
    """Serves a good run, a damaged one, a pair to compare, and a file of views.

    Attributes:
        fake: The run `pair/new`.
        views: The file of views.
    """

    def __init__(self, folder: Path) -> None:
        runs = folder / "runs"
        self.views = folder / "views.py"
        self.views.write_text(VIEWS)
        old = FakeRun(runs / "pair" / "old", nodes=["embed"], layers=1, seed=3, start=1e9)
        self.fake = FakeRun(
            runs / "pair" / "new", nodes=["embed", "head"], layers=1, nonfinite_from=5, start=1e9
        )
        for run in (old, self.fake):
            run.write(6)
            run.close()
        super().__init__(runs, folder / "log", "--views", str(self.views))


def announced(log: Path, pattern: str) -> str:
    """Waits until a server has written its address and returns it."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")
