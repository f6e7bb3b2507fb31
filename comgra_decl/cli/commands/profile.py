"""The command `comgra-decl profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from comgra_decl.cli.printing import AsJson, Everything, RunPath, print_json

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run

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

    The spec names these steps: `profile: {steps: [10, 13]}`. Without a profile, the time of each
    module's forward pass is shown, which every run measures now and then. JSON of more than 20 kB
    is shortened; "left_out" tells what is missing.
    """
    from comgra_decl.query import open_run

    tables = _tables(open_run(run))
    if as_json:
        from comgra_decl.cli.describe import rows as rows_of

        content = {name: rows_of(each.reset_index()) for name, each in tables.items()}
        print_json(content, everything=everything)
        return
    from comgra_decl.cli.tables import phases_table, profile_table, times_table
    from comgra_decl.terminal import console

    out, table = console(), tables["nodes"] if "nodes" in tables else tables["modules"]
    if "nodes" in tables:
        out.print(phases_table(tables["steps"]), "", profile_table(table.head(rows)), sep="\n")
    else:
        out.print(
            f"forward pass on the host, without a profiler: mean of {table.attrs['steps']} steps",
            times_table(table.head(rows)),
            sep="\n",
        )
    if len(table) > rows:
        out.print(f"{len(table) - rows} more rows; print them with --rows {len(table)}.")


def _tables(run: Run) -> dict[str, pd.DataFrame]:
    """Return the profile and the times of modules, as far as the run has them.

    Raises:
        UnknownNameError: it has neither; the message says how to create a profile.
    """
    from comgra_decl.errors import UnknownNameError

    found: dict[str, pd.DataFrame] = {}
    missing: UnknownNameError | None = None
    try:
        found = {"nodes": run.profile(), "steps": run.profile(by="step")}
    except UnknownNameError as error:
        missing = error
    try:
        found["modules"] = run.module_times()
    except UnknownNameError:
        if missing is not None:
            raise missing from None
    return found
