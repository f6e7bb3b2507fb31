"""The command `comgra-decl index`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, Root, print_json, print_line

PANEL = "Look"


def command(
    root: Root = Path("runs"),
    to: Annotated[
        str | None, typer.Option(help="File to write instead of the index in the folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a table of all runs, which DuckDB, Polars and pandas can read.

    One row per run: state, metrics, findings, settings and origin. Lists of runs use the same file,
    so that they need not open runs again that have ended.
    """
    from comgra_decl.query import open_group

    group = open_group(root)
    where = group.index(to)
    if as_json:
        print_json({"path": where, "runs": len(group)})
    else:
        print_line(f"{where}: {len(group)} runs")
