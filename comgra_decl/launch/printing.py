"""What the commands share: arguments that mean the same everywhere, and how they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from comgra_decl.errors import RunNotFoundError, did_you_mean

Root = Annotated[Path, typer.Argument(help="Folder of all runs, or of a group.")]
RunPath = Annotated[Path, typer.Argument(help="A run; a group or a root gives its newest run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def print_json(content: Any) -> None:
    """Prints what JSON can hold; what it cannot (a NaN) is a mistake of ours."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def require_folder(folder: Path) -> None:
    """Raises `RunNotFoundError`, naming near ones, unless there is such a folder."""
    if folder.is_dir():
        return
    parent = folder.absolute().parent
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    raise RunNotFoundError(f"there is no folder {folder}{did_you_mean(folder.name, siblings)}")
