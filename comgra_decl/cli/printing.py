"""Arguments and output functions that the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comgra_decl.visible import visible

if TYPE_CHECKING:
    from comgra_decl.store.location import Location

# Path, so that shells complete it; `location` recognises a URL that was converted to a Path.
Root = Annotated[Path, typer.Argument(help="Root folder, or folder of a group; or s3://, gs://.")]
RunPath = Annotated[
    Path,
    typer.Argument(help="A run, or a group or root to use its newest run; or s3://, gs://."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_line(text: str) -> None:
    """Print a line; on a terminal, escape control characters."""
    sys.stdout.write(f"{visible(text) if sys.stdout.isatty() else text}\n")


def print_json(content: Any) -> None:
    """Print `content` as JSON; a NaN raises ValueError, since it indicates a bug."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def run_folder(path: Path) -> Location:
    """Return the run at `path` in any state, or the newest run in that folder.

    Raises:
        RunNotFoundError: there is none.
    """
    from comgra_decl.query import list_runs, open_run

    runs = list_runs(path)
    return runs[-1].path if runs else open_run(path).path  # raises an error that explains why


def bytes_text(number: int) -> str:
    """Return a number of bytes as text with a decimal unit (kB, MB, GB)."""
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


OnProgress = Callable[[str, int, int], None]
"""Receives the task's description, the amount done, and the total."""


@contextmanager
def bar() -> Iterator[OnProgress]:
    """Yield a callback that updates a progress bar; the bar disappears at the end."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield on_progress


def _ignore(what: str, done: int, total: int) -> None:
    """Ignore progress when standard error is not a terminal."""
