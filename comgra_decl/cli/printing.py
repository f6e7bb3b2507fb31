"""Arguments and output functions that the commands share."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comgra_decl.visible import visible

if TYPE_CHECKING:
    from comgra_decl.store.location import Location

# The `Path` type lets shells complete paths; `location` recognises URLs converted to Path.
Root = Annotated[
    Path, typer.Argument(help="Root or group folder: a path or an s3:// or gs:// URL.")
]
RunPath = Annotated[
    Path,
    typer.Argument(
        help="Path or URL of a run's folder; in a group or root folder, the newest run is used."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Everything = Annotated[
    bool, typer.Option("--all", help="With --json, print everything, whatever its size.")
]


def print_line(text: str) -> None:
    """Print a line; escape control characters on a terminal."""
    sys.stdout.write(f"{visible(text) if sys.stdout.isatty() else text}\n")


def print_json(content: Any, *, everything: bool = True) -> None:
    """Print `content` as JSON; raise ValueError for NaN, which would indicate a bug.

    Args:
        content: JSON data.
        everything: whether it is printed whatever its size, not `shortened`.
    """
    content = content if everything else shortened(content)
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


_MOST_JSON = 20_000
"""Size in bytes up to which JSON that describes a run is complete."""


def shortened(content: Mapping[str, Any], *, most: int = _MOST_JSON) -> dict[str, Any]:
    """Return JSON data whose longest lists are cut until it fits into `most` bytes as printed.

    Mappings of names to numbers, such as counts, are cut like lists.

    "left_out" tells how many entries of which list are missing, such as {"slots": 1900}; it is
    empty if the content is complete.
    """
    shown: dict[str, Any] = copy.deepcopy(dict(content)) | {"left_out": {}}
    while (size := _printed(shown)) > most:
        lists = {name: each for name, each in _lists(shown) if len(each) > _FEWEST}
        if not lists:
            return shown
        name = max(lists, key=lambda each: _printed(lists[each]))
        longest = lists[name]
        excess = len(longest) * (size - most) // max(1, _printed(longest))
        keep = max(_FEWEST, min(len(longest) - 1, len(longest) - excess))
        shown["left_out"][name] = shown["left_out"].get(name, 0) + len(longest) - keep
        if isinstance(longest, list):
            del longest[keep:]
        else:
            for key in [*longest][keep:]:
                del longest[key]
    return shown


_FEWEST = 3
"""Number of entries of a list that are never left out."""


def _printed(content: Any) -> int:
    return len(json.dumps(content, indent=2))


_DESCENDED = 50
"""Number of entries up to which the entries of a list are searched for lists."""


def _lists(
    content: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, list[Any] | dict[str, Any]]]:
    """Yield the lists and counts in nested data, by the path of their keys."""
    for name, each in content.items():
        if isinstance(each, list):
            yield f"{prefix}{name}", each
            for at, entry in enumerate(each if len(each) <= _DESCENDED else ()):
                if isinstance(entry, Mapping):
                    yield from _lists(entry, f"{prefix}{name}[{at}].")
        elif isinstance(each, dict) and each and name != "left_out":
            if all(isinstance(value, (int, float)) for value in each.values()):
                yield f"{prefix}{name}", each
            yield from _lists(each, f"{prefix}{name}.")


def run_folder(path: Path) -> Location:
    """Return the run at `path` in any state, or the newest run in that folder.

    Raises:
        RunNotFoundError: the folder contains no run.
    """
    from comgra_decl.query import list_runs, open_run

    runs = list_runs(path)
    return runs[-1].path if runs else open_run(path).path  # raises an error with the reason


def bytes_text(number: int) -> str:
    """Return a number of bytes as text with a decimal unit (kB, MB, GB)."""
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


OnProgress = Callable[[str, int, int], None]
"""Callback that receives a task's description, its progress, and the total."""


@contextmanager
def bar() -> Iterator[OnProgress]:
    """Yield a callback that updates a progress bar; remove the bar at the end."""
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
    """Do nothing; used instead of the progress bar if standard error is not a terminal."""
