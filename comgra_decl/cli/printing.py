"""Arguments and output functions that the commands share."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


def print_json(
    content: Mapping[str, Any], *, everything: bool = False, missing: str = "left_out"
) -> None:
    """Print `content` as JSON; raise ValueError for NaN, which would indicate a bug.

    Args:
        content: JSON data.
        everything: whether it is printed whatever its size, not `shortened`.
        missing: the name under which the shortened content tells what is missing.
    """
    content = content if everything else shortened(content, missing=missing)
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


_MOST_JSON = 20_000
"""Size in bytes up to which JSON that describes a run is complete."""


@dataclass(frozen=True)
class _Limits:
    """How much of the content is kept.

    Attributes:
        size: the largest size of a list, in bytes.
        entries: number of entries of a list that are kept, whatever its size.
        text: number of characters of a text that are kept, even if the size allows less.
    """

    size: int
    entries: int
    text: int

    @property
    def characters(self) -> int:
        """The largest length of a text."""
        return max(self.text, self.size // 4)


_STRICTER = ((3, 500), (1, 200), (0, 60))
"""Numbers of entries and of characters that are kept; those that suffice are used."""

_DESCENDED = 50
"""Number of entries up to which the entries of a list are searched for lists, and up to which a
mapping that contains more than numbers is kept."""


def shortened(
    content: Mapping[str, Any], *, most: int = _MOST_JSON, missing: str = "left_out"
) -> dict[str, Any]:
    """Return JSON data whose longest lists and texts are cut so that it fits into `most` bytes.

    All lists share the space: each is cut to the same size in bytes, unless it is shorter. Mappings
    of names to numbers, such as counts, and mappings with many entries are cut like lists. A text
    that is cut ends with an ellipsis.

    Args:
        content: JSON data with a fixed set of names at the top.
        most: the size in bytes.
        missing: the name of the mapping that tells how many entries of which list, or characters
            of which text, are missing, such as {"slots": 1900}; the mapping is empty if the content
            is complete.
    """
    whole: dict[str, Any] = {**content, missing: {}}
    if _printed(whole) <= most:
        return copy.deepcopy(whole)

    def cut(size: int, kept: tuple[int, int]) -> dict[str, Any]:
        left_out: dict[str, int] = {}
        return _cut_mapping(content, _Limits(size, *kept), "", left_out) | {missing: left_out}

    kept = next((each for each in _STRICTER if _printed(cut(0, each)) <= most), _STRICTER[-1])
    fits, exceeds = 0, most
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if _printed(cut(middle, kept)) <= most:
            fits = middle
        else:
            exceeds = middle
    return cut(fits, kept)


def _printed(content: Any) -> int:
    return len(json.dumps(content, indent=2))


def _cut_mapping(
    content: Mapping[str, Any], limits: _Limits, prefix: str, left_out: dict[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in content.items():
        path = f"{prefix}{name}"
        numbers = isinstance(each, Mapping) and all(
            isinstance(value, int | float) for value in each.values()
        )
        if isinstance(each, Mapping) and (numbers or len(each) > _DESCENDED):
            kept = _kept([*each.items()], limits)
            _count(left_out, path, len(each) - len(kept))
            each = dict(kept)
        found[name] = _cut(each, limits, path, left_out)
    return found


def _cut(thing: Any, limits: _Limits, path: str, left_out: dict[str, int]) -> Any:
    """Return a list, mapping or text that is cut; anything else as it is."""
    if isinstance(thing, Mapping):
        return _cut_mapping(thing, limits, f"{path}.", left_out)
    if isinstance(thing, list):
        return _cut_list(thing, limits, path, left_out)
    if isinstance(thing, str) and len(thing) > limits.characters:
        _count(left_out, path, len(thing) - limits.characters)
        return thing[: limits.characters] + "\N{HORIZONTAL ELLIPSIS}"
    return thing


def _cut_list(
    entries: list[Any], limits: _Limits, path: str, left_out: dict[str, int]
) -> list[Any]:
    kept = _kept(entries, limits)
    _count(left_out, path, len(entries) - len(kept))
    if len(kept) > _DESCENDED and not any(_has_long_text(each, limits) for each in kept):
        return kept
    return [_cut(each, limits, f"{path}[{at}]", left_out) for at, each in enumerate(kept)]


def _kept(entries: list[Any], limits: _Limits) -> list[Any]:
    """Return the first entries, which take at most the allowed size once their texts are cut."""
    taken = 0
    for number, entry in enumerate(entries):
        long = _has_long_text(entry, limits)
        taken += _printed(_cut(entry, limits, "", {}) if long else entry)
        if taken > limits.size and number >= limits.entries:
            return entries[:number]
    return [*entries]


def _has_long_text(thing: Any, limits: _Limits) -> bool:
    if isinstance(thing, str):
        return len(thing) > limits.characters
    inner = thing.values() if isinstance(thing, Mapping) else thing
    if not isinstance(thing, (Mapping, list, tuple)):
        return False
    return any(_has_long_text(each, limits) for each in inner)


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
