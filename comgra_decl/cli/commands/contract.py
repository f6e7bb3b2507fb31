"""The command `comgra-decl contract`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from comgra_decl.cli.printing import RunPath

PANEL = "Look"


def command(
    run: RunPath,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes to include, as a pattern: 'blocks.*'.")
    ] = None,
    slack: Annotated[
        float,
        typer.Option(min=0.0, help="How far values may leave the range of this run, in ranges."),
    ] = 1.0,
) -> None:
    """Print the contract of a good run as YAML: its graph and the range of each statistic.

    `comgra-decl check` compares other runs with it.
    """
    from comgra_decl.query import open_run
    from comgra_decl.rules.contract import contract_of, to_yaml

    sys.stdout.write(to_yaml(contract_of(open_run(run), nodes=nodes, slack=slack)))
