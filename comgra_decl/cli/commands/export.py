"""The command `comgra-decl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line

PANEL = "Keep"


def command(
    run: RunPath,
    target: Annotated[Path, typer.Argument(help="File or folder to create.")],
    format_: Annotated[
        str, typer.Option("--format", "-f", help="Format: parquet, csv, zarr, npz or trace.")
    ] = "parquet",
    nodes: Annotated[
        str | None, typer.Option(help="Nodes to export, as a pattern: 'blocks.*'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a run for other programs: tables (Parquet, CSV), arrays (zarr v3, npz) or a trace.

    A trace is a time line of records, metrics and profiled steps for Perfetto or Chrome.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.export import export_run
    from comgra_decl.query import open_run

    opened = open_run(run)
    with bar() as on_progress:
        written = export_run(opened, target, format_, nodes=nodes, progress=on_progress)
    if as_json:
        print_json({"path": str(written), "source": str(opened.path), "format": format_})
    else:
        print_line(str(written))
