"""The entry point of `comgra-decl`; its commands are in `commands/`, one per file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from comgra_decl import __version__
from comgra_decl.cli.commands import register
from comgra_decl.doors import environment
from comgra_decl.errors import ComgraError, Exit
from comgra_decl.visible import visible

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with code 2 if it cannot be carried out."""
    arguments = sys.argv[1:] if arguments is None else arguments
    environment.taken()  # COMGRA applies to training programs only
    try:
        if arguments and arguments[0] in _passed_on:
            _passed_on[arguments[0]](arguments[1:])
        else:
            _require_paths(arguments)
            app(args=[*arguments], prog_name="comgra-decl")
    except ComgraError as error:
        sys.stderr.write(f"comgra-decl: {visible(str(error))}\n")
        sys.exit(Exit.WRONG)


def _require_paths(arguments: Sequence[str]) -> None:
    """Raise StoreError for an empty argument, which pathlib would treat as the current folder.

    Except for the values of options, all arguments that Typer parses are paths.
    """
    if "" not in arguments[1:]:
        return
    from comgra_decl.store.location import require_path

    command = getattr(typer.main.get_command(app), "commands", {}).get(arguments[0])
    options = [] if command is None else command.params
    valued = {name for each in options if not getattr(each, "is_flag", True) for name in each.opts}
    for before, word in pairwise(arguments):
        if before not in valued:
            require_path(word)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"comgra-decl {__version__}")
        raise typer.Exit


@app.callback()
def _comgra_decl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """See inside a PyTorch model while it trains."""


_passed_on = register(app)
