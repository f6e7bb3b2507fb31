"""The command `comgra-decl memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, Everything, RunPath, print_json

PANEL = "Look"


def command(
    run: RunPath,
    rows: Annotated[
        int, typer.Option("--rows", "-n", min=1, help="Number of nodes to print.")
    ] = 20,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what holds the memory in a run's measured steps: activations, parameters, and so on.

    The spec names these steps: `memory: {steps: 10}`. JSON of more than 20 kB is shortened;
    "left_out" tells what is missing.
    """
    from comgra_decl.query import open_run

    table = open_run(run).memory()
    if as_json:
        from comgra_decl.cli.describe import rows as rows_of

        content = {"nodes": rows_of(table.reset_index())}
        print_json(content, everything=everything)
        return
    from comgra_decl.cli.tables import memory_table
    from comgra_decl.records import OTHER
    from comgra_decl.terminal import console

    out = console()
    out.print("in MB, including modules within a node", memory_table(table.head(rows)), sep="\n")
    if len(table) > rows:
        out.print(f"{len(table) - rows} more rows; print them with --rows {len(table)}.")
    if not table["allocated"].notna().any():
        out.print(
            "On the CPU, activations are the tensors that autograd saves; temporary memory is not "
            "measured."
        )
    inner = table["checkpoint_saves"].drop(OTHER, errors="ignore").iloc[1:]
    if len(inner) and inner.max() > 0:
        out.print(
            f"A checkpoint (torch.utils.checkpoint) of {inner.idxmax()} would save "
            f"{inner.max() / 1e6:.2f} MB at the end of the forward pass, and repeat its forward "
            "pass in the backward pass."
        )
