"""What the commands share: arguments that mean the same everywhere, and how they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comgra_decl.errors import RunNotFoundError, did_you_mean

if TYPE_CHECKING:
    from comgra_decl.store.location import Location

# Paths, so that a shell completes them; `location` knows a URL that has become one.
Root = Annotated[Path, typer.Argument(help="Folder of all runs, or of a group; or s3://, gs://.")]
RunPath = Annotated[
    Path,
    typer.Argument(help="A run, or a group or root for its newest run; or s3://, gs://."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def printable(text: str) -> str:
    """Returns text without the characters that tell a terminal to do something.

    Names of nodes and all else that a run says may come from anybody.
    """
    return text.translate(_CONTROLS)


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


def require_folder(folder: Path) -> None:
    """Raises `RunNotFoundError`, naming near ones, unless there is such a folder."""
    from comgra_decl.store.location import Remote, location

    if folder.is_dir() or isinstance(location(folder), Remote):
        return
    parent = folder.absolute().parent
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    raise RunNotFoundError(f"there is no folder {folder}{did_you_mean(folder.name, siblings)}")
