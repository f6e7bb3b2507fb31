"""The command `comgra-decl verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, run_folder
from comgra_decl.errors import Exit

if TYPE_CHECKING:
    from comgra_decl.store.location import Location
    from comgra_decl.store.verify import Verdict

PANEL = "Keep"


def command(run: RunPath, as_json: AsJson = False) -> None:
    """Read an entire run and report damage, lost data, and which data can be recovered.

    The run, which may be live, is not modified. Exits with code 3 if the run is damaged.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.store.copying import databases
    from comgra_decl.store.verify import damages_beside, verify

    folder = run_folder(run)
    with bar() as on_progress:
        verdicts = [verify(path, progress=on_progress) for path in databases(folder)]
    whole = all(verdict.whole for verdict in verdicts)
    together = _not_joined(folder) if whole else None
    beside = damages_beside(folder)
    whole = whole and together is None and not beside
    if as_json:
        content = [_described(verdict) for verdict in verdicts]
        print_json(
            {
                "path": str(folder),
                "whole": whole,
                "ranks": together,
                "databases": content,
                "beside": [vars(damage) for damage in beside],
            }
        )
    else:
        from comgra_decl.cli.tables import print_beside, print_verdict

        for verdict in verdicts:
            print_verdict(verdict)
        if together is not None:
            typer.echo(together)
        if beside:
            print_beside(beside)
    if not whole:
        raise typer.Exit(Exit.WANTING)


def _not_joined(folder: Location) -> str | None:
    """Return why intact databases are not ranks of one run; None if they are."""
    from comgra_decl.errors import DamagedRunError
    from comgra_decl.query.ranks.reader import open_reader

    try:
        open_reader(folder)
    except DamagedRunError as error:
        return str(error)
    return None


def _described(verdict: Verdict) -> dict[str, Any]:
    return {
        **vars(verdict),
        "path": str(verdict.path),
        "whole": verdict.whole,
        "damages": [vars(damage) for damage in verdict.damages],
    }
