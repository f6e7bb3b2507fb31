"""The command `comgra-decl explain`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from comgra_decl.cli.printing import RunPath

PANEL = "Look"

_Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import and run the custom rules that the run refers to."),
]


def command(run: RunPath, trust: _Trust = False) -> None:
    """Print one page of Markdown about a run, for an issue or a language model.

    The page contains the facts of the run, the verdict, the findings with their evidence and, if
    the program failed, the post-mortem.
    """
    from comgra_decl.cli.explaining import explained
    from comgra_decl.query import open_run
    from comgra_decl.rules import diagnose

    opened = open_run(run)
    sys.stdout.write(explained(opened, diagnose(opened, trust=trust)))
