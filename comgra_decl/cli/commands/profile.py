"""The command `comgra-decl profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, Everything, RunPath, print_json

PANEL = "Look"


def command(
    run: RunPath,
    rows: Annotated[
        int, typer.Option("--rows", "-n", min=1, help="Number of nodes and passes to print.")
    ] = 20,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a run's profiled steps went, by node and by phase of the step.

    The spec names these steps: `profile: {steps: [10, 13]}`. JSON of more than 20 kB is shortened;
    "left_out" tells what is missing.
    """
    from comgra_decl.query import open_run

    opened = open_run(run)
    table, steps = opened.profile(), opened.profile(by="step")
    if as_json:
        from comgra_decl.cli.describe import rows as rows_of

        tables = {"nodes": table, "steps": steps}
        content = {name: rows_of(each.reset_index()) for name, each in tables.items()}
        print_json(content, everything=everything)
        return
    from comgra_decl.cli.tables import phases_table, profile_table
    from comgra_decl.terminal import console

    out = console()
    out.print(phases_table(steps), "", profile_table(table.head(rows)), sep="\n")
    if len(table) > rows:
        out.print(f"{len(table) - rows} more rows; print them with --rows {len(table)}.")
