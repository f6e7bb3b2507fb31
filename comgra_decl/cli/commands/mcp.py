"""The command `comgra-decl mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import Root

PANEL = "Look"


def command(
    root: Root = Path("runs"),
    allow_plan: Annotated[
        bool,
        typer.Option(
            "--allow-plan", help="Let agents run training scripts for a few steps (`plan`)."
        ),
    ] = False,
) -> None:
    """Serve runs to agents with the Model Context Protocol, over standard input and output.

    Tools list and open runs, read series, steps and findings, compare runs and show pictures. They
    only read runs below ROOT, unless `--allow-plan` adds a tool that runs scripts.
    """
    from comgra_decl.cli.agents import server

    server(root, allow_plan=allow_plan).run("stdio")
