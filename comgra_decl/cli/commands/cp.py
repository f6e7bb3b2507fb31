"""The command `comgra-decl cp`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, run_folder, say
from comgra_decl.visible import visible

PANEL = "Keep"


def command(
    run: RunPath,
    target: Annotated[
        Path,
        typer.Argument(help="The folder or URL to be; in an existing one the run keeps its name."),
    ],
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave out what is stored twice.")
    ] = False,
    version: Annotated[
        int | None, typer.Option(help="Copy what there was in this version; see `verify`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a whole run as it is now, also while it is being recorded.

    The copy appears when it is whole. That of a live run is "stopped", and says why.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.copying import copy_run
    from comgra_decl.store.location import location

    folder = run_folder(run)
    left_out: dict[str, str] = {}
    with bar() as tell:
        copy = copy_run(
            folder,
            location(target),
            version=version,
            compact=compact,
            progress=tell,
            passed_over=left_out.__setitem__,
        )
    for name, why in left_out.items():
        sys.stderr.write(f"comgra-decl: {visible(name)} is not copied: {why}\n")
    if as_json:
        print_json({"path": str(copy), "source": str(folder), "left_out": left_out})
    else:
        say(str(copy))
