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
    """Return JSON data whose longest lists are cut so that it just fits into `most` bytes.

    All lists share the space: each is cut to the same size in bytes, unless it is shorter. Mappings
    of names to numbers, such as counts, are cut like lists.

    "left_out" tells how many entries of which list are missing, such as {"slots": 1900}; it is
    empty if the content is complete.
    """
    whole: dict[str, Any] = {**content, "left_out": {}}
    if _printed(whole) <= most:
        return copy.deepcopy(whole)
    fits, exceeds = 0, most
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if _printed(_cut(content, middle)) <= most:
            fits = middle
        else:
            exceeds = middle
    return _cut(content, fits)


_FEWEST = 3
"""Number of entries of a list that are never left out."""

_DESCENDED = 50
"""Number of entries up to which the entries of a list are searched for lists."""


def _printed(content: Any) -> int:
    return len(json.dumps(content, indent=2))


def _cut(content: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return data whose lists take at most `size` bytes each, and what is left out."""
    left_out: dict[str, int] = {}
    found: dict[str, Any] = _cut_mapping(content, size, "", left_out)
    return found | {"left_out": left_out}


def _cut_mapping(
    content: Mapping[str, Any], size: int, prefix: str, left_out: dict[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in content.items():
        path = f"{prefix}{name}"
        if isinstance(each, list):
            found[name] = _cut_list(each, size, path, left_out)
        elif isinstance(each, Mapping) and all(isinstance(v, int | float) for v in each.values()):
            kept = _kept([*each.items()], size)
            _count(left_out, path, len(each) - len(kept))
            found[name] = dict(kept)
        elif isinstance(each, Mapping):
            found[name] = _cut_mapping(each, size, f"{path}.", left_out)
        else:
            found[name] = each
    return found


def _cut_list(entries: list[Any], size: int, path: str, left_out: dict[str, int]) -> list[Any]:
    kept = _kept(entries, size)
    _count(left_out, path, len(entries) - len(kept))
    if len(kept) > _DESCENDED:
        return kept
    return [
        _cut_mapping(each, size, f"{path}[{at}].", left_out) if isinstance(each, Mapping) else each
        for at, each in enumerate(kept)
    ]


def _kept(entries: list[Any], size: int) -> list[Any]:
    """Return the first entries, which take at most `size` bytes, but at least three."""
    taken = 0
    for number, entry in enumerate(entries):
        taken += _printed(entry)
        if taken > size and number >= _FEWEST:
            return entries[:number]
    return [*entries]


def _count(left_out: dict[str, int], path: str, number: int) -> None:
    if number:
        left_out[path] = number


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
