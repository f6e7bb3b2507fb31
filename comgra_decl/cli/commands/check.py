"""The command `comgra-decl check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line
from comgra_decl.errors import Exit

PANEL = "Look"
_SHOWN = 10


def command(
    run: RunPath,
    contract: Annotated[Path, typer.Argument(help="A file that `comgra-decl contract` printed.")],
    as_json: AsJson = False,
) -> None:
    """Check a run against the contract of a good run; name the tensor that left it first.

    Exits with code 3 if the run does not keep to the contract.
    """
    from comgra_decl.query import open_run
    from comgra_decl.rules.contract import breaches, read

    opened = open_run(run)
    found = breaches(opened, read(contract))
    if as_json:
        shown = [each._asdict() for each in found[: 10 * _SHOWN]]
        told = {"kept": not found, "breaches": len(found), "first": shown}
        print_json(told)
    elif not found:
        print_line("The run keeps to the contract.")
    else:
        for each in found[:_SHOWN]:
            print_line(each.message)
        if len(found) > _SHOWN:
            print_line(f"and {len(found) - _SHOWN} more")
    if found:
        raise typer.Exit(Exit.WANTING)
