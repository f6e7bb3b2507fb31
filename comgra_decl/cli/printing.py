"""What the commands share: arguments that mean the same everywhere, and how they print."""

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

# Paths, so that a shell completes them; `location` knows a URL that has become one.
Root = Annotated[Path, typer.Argument(help="Folder of all runs, or of a group; or s3://, gs://.")]
RunPath = Annotated[
    Path,
    typer.Argument(help="A run, or a group or root for its newest run; or s3://, gs://."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def say(text: str) -> None:
    """Prints a line: to a terminal with what it would obey spelt out, to a program as it is."""
    sys.stdout.write(f"{visible(text) if sys.stdout.isatty() else text}\n")


def print_json(content: Any) -> None:
    """Prints what JSON can hold; what it cannot (a NaN) is a mistake of ours."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def run_folder(path: Path) -> Location:
    """Returns the run that a path means, whatever state it is in; of a folder the newest.

    Raises:
        RunNotFoundError: there is none.
    """
    from comgra_decl.query import list_runs, open_run

    runs = list_runs(path)
    return runs[-1].path if runs else open_run(path).path  # which says what is there instead


def bytes_text(number: int) -> str:
    """Returns a number of bytes with its unit, in thousands."""
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


Tell = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@contextmanager
def bar() -> Iterator[Tell]:
    """Yields what is to be told of the work; its bar goes away with it."""
    if not sys.stderr.isatty():
        yield _nobody
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        yield tell


def _nobody(what: str, done: int, total: int) -> None:
    """Hears of the work where nobody looks."""
