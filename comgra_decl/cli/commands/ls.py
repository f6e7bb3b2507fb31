"""The command `comgra-decl ls`."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.cli.printing import AsJson, Root, print_json, print_line

PANEL = "Look"


def command(root: Root = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder, oldest first."""
    from comgra_decl.cli.describe import describe_summary
    from comgra_decl.query import list_runs, location, require_folder

    require_folder(location(root))
    runs = [describe_summary(summary) for summary in list_runs(root)]
    if as_json:
        print_json(runs)
    elif not runs:
        print_line(f"There are no runs in {location(root)} yet.")
    else:
        from comgra_decl.cli.tables import runs_table
        from comgra_decl.terminal import console

        console().print(runs_table(runs))
