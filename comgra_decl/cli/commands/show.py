"""The command `comgra-decl show`."""

from __future__ import annotations

from comgra_decl.cli.printing import AsJson, Everything, RunPath, print_json

PANEL = "Look"


def command(
    run: RunPath,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, and what was recorded at which steps.

    JSON of more than 20 kB is shortened; "left_out" tells what is missing.
    """
    from comgra_decl.cli.describe import describe_run
    from comgra_decl.query import open_run

    description = describe_run(open_run(run))
    if as_json:
        print_json(description, everything=everything)
    else:
        from comgra_decl.cli.tables import run_table, slots_table
        from comgra_decl.terminal import console

        out = console()
        out.print(run_table(description))
        if description["slots"]:
            out.print("", slots_table(description["slots"]), sep="\n")
