"""Viewers in separate processes, and helpers shared by their tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import comgra_decl
from tests.support.fake_run import FakeRun
from tests.support.forked import Program
from tests.viewer.conftest import HARMLESS

VIEWER = Path(comgra_decl.__file__).parent / "viewer"
REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE = 60  # seconds for a server to start, on a busy machine

Start = Callable[..., str]
CODE = "from comgra_decl.cli.main import main; main()"

VIEWS = """
from comgra_decl.viewer.custom import View
def views():
    return [View("Where", lambda look: f"it is **{look.node}** at {look.step}"), View("Bad", len)]
"""


def turn_to(page: Any, section: str) -> None:
    """Opens a section of an open page by its tab, and waits until it is drawn."""
    page.locator(f'[data-send="{section}"][role="tab"]').press("Enter")
    page.locator(f'[data-send="{section}"][aria-selected="true"]').wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")


class Started:
    """A server in a separate process that has already imported everything (see `Program`)."""

    def __init__(self, folder: Path, *arguments: object, **environment: str) -> None:
        self._program = Program(folder, *arguments, env=environment)

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._program.process.pid

    @property
    def said(self) -> str:
        """Everything it has written to standard error so far."""
        return self._program.err.read_text()

    def interrupt(self) -> CompletedProcess[str]:
        """Ends it like Ctrl-C; returns the result."""
        return self._program.interrupt()

    def wait_for(self, pattern: str) -> str:
        """Waits until it prints a match, and returns the first group."""
        return self._program.wait_for(pattern, PATIENCE)


class Server(Started):
    """A `panel serve viewer`.

    Attributes:
        url: The address that it printed.
    """

    def __init__(self, root: Path, *more: str) -> None:
        command = ["-m", "panel", "serve", VIEWER, "--port", "0", "--address", "127.0.0.1"]
        super().__init__(REPOSITORY, *command, "--args", root, *more)
        self.url = self.wait_for(r"app running at: (http://127\.0\.0\.1:\d+/viewer)")

    def stop(self) -> None:
        """Ends the server; fails if it logged an error."""
        said = self.interrupt().stderr
        blocks = said.split("Task exception was never retrieved")
        errors = [b for b in blocks if "Traceback" in b and not HARMLESS.search(b)]
        errors += [line for line in said.splitlines() if " ERROR" in line]
        assert not errors, "the server logged errors:\n" + "\n".join(errors)


class Viewed(Started):
    """A `comgra-decl view`.

    Attributes:
        url: The address that it printed.
    """

    def __init__(self, root: Path, *more: str, **environment: str) -> None:
        command = ["-c", CODE, "view", root, "--port", "0", "--no-show", *more]
        super().__init__(REPOSITORY, *command, **environment)
        self.url = self.wait_for(r"(http://\S+)\s")

    def stop(self) -> None:
        """Ends the server; fails if it logged a traceback."""
        said = self.interrupt().stderr
        assert "Traceback" not in said, said


class Gallery(Server):
    """Serves a good run, a damaged one, a pair to compare, and a file of views.

    Attributes:
        fake: The run `pair/new`.
        views: The file with views.
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
        super().__init__(runs, "--views", str(self.views))
