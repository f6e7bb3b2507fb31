"""The command `comgra-decl cp`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line, run_folder
from comgra_decl.visible import visible

PANEL = "Keep"


def command(
    run: RunPath,
    target: Annotated[
        Path,
        typer.Argument(
            help="Folder or URL of the copy; in an existing folder, the copy keeps the run's name."
        ),
    ],
    compact: Annotated[bool, typer.Option("--compact", help="Leave out duplicate data.")] = False,
    version: Annotated[
        int | None, typer.Option(help="Copy this version of the run, as reported by `verify`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy an entire run in its current state, even while it is being recorded.

    The copy appears only when it is complete. If the run is live, the copy is marked as stopped,
    with the reason.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.copying import copy_run
    from comgra_decl.store.location import location

    folder = run_folder(run)
    left_out: dict[str, str] = {}
    with bar() as on_progress:
        copy = copy_run(
            folder,
            location(target),
            version=version,
            compact=compact,
            progress=on_progress,
            passed_over=left_out.__setitem__,
        )
    for name, why in left_out.items():
        sys.stderr.write(f"comgra-decl: {visible(name)} was not copied: {why}\n")
    if as_json:
        content = {"path": str(copy), "source": str(folder), "left_out": left_out}
        print_json(content, missing="not_shown")
    else:
        print_line(str(copy))
