"""The command `comgra-decl mcp`."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.cli.printing import Root

PANEL = "Look"


def command(root: Root = Path("runs")) -> None:
    """Serve runs to agents with the Model Context Protocol, over standard input and output.

    Tools list and open runs, read series, steps and findings, compare runs and show pictures. They
    only read runs below ROOT.
    """
    from comgra_decl.cli.agents import server

    server(root).run("stdio")
