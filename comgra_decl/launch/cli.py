"""The command `comgra-decl`."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from comgra_decl import __version__
from comgra_decl.errors import ComgraError, RunNotFoundError, did_you_mean

_USAGE_ERROR = 2
"""Exit code when what was asked for cannot be done."""

_CANNOT_LISTEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
"""The port is taken, the address is not this machine's, or the port needs privileges."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Root = Annotated[Path, typer.Argument(help="Folder of all runs, or of a group.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; ends with exit code 2 if what it asks for cannot be done."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["run"]:
            # Not a command like the others: what the script raises is the script's own business.
            from comgra_decl.launch.script import main as run_script

            run_script(arguments[1:])
        elif arguments[:1] == ["plan"]:
            from comgra_decl.launch.rehearse import main as rehearse

            rehearse(arguments[1:])
        else:
            app(args=[*arguments], prog_name="comgra-decl")
    except ComgraError as error:
        sys.stderr.write(f"comgra-decl: {error}\n")
        sys.exit(_USAGE_ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"comgra-decl {__version__}")
        raise typer.Exit


@app.callback()
def _comgra_decl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """See inside a PyTorch network while it trains."""


@app.command("ls")
def list_command(root: Root = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder, oldest first."""
    from comgra_decl.launch.describe import describe_summary
    from comgra_decl.query import list_runs

    _require_folder(root)
    runs = [describe_summary(summary) for summary in list_runs(root)]
    if as_json:
        _print_json(runs)
    elif not runs:
        print(f"There is no run in {root} yet.")
    else:
        from comgra_decl.launch.tables import console, runs_table

        console().print(runs_table(runs))


@app.command("show")
def show_command(
    run: Annotated[Path, typer.Argument(help="A run; a group or a root gives its newest run.")],
    as_json: AsJson = False,
) -> None:
    """Say what a run has recorded, of what, and how it went."""
    from comgra_decl.launch.describe import describe_run
    from comgra_decl.query import open_run

    description = describe_run(open_run(run))
    if as_json:
        _print_json(description)
    else:
        from comgra_decl.launch.tables import console, run_table, slots_table

        out = console()
        out.print(run_table(description))
        if description["slots"]:
            out.print("", slots_table(description["slots"]), sep="\n")


@app.command("view")
def view_command(
    root: Root = Path("runs"),
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.")] = 5006,
    address: Annotated[str, typer.Option(help="Network address to listen on.")] = "127.0.0.1",
    show: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Look at runs in the browser, also while they are being recorded."""
    from comgra_decl.viewer.serve import serve

    try:
        serve(root, port=port, address=address, show=show)
    except OSError as error:
        if isinstance(error, ComgraError) or error.errno not in _CANNOT_LISTEN:
            raise
        raise ComgraError(
            f"the viewer cannot listen on {address}:{port} ({error.strerror}); "
            "choose another port with --port, or a free one with --port 0"
        ) from None


@app.command("run", add_help_option=False)
def run_command() -> None:
    """Run a training script and record it; the same as `python -m comgra_decl`."""
    raise AssertionError("main() passes this on before the command line is parsed")


@app.command("plan", add_help_option=False)
def plan_command() -> None:
    """Say what a spec would catch of a script, and what it would cost, without training."""
    raise AssertionError("main() passes this on before the command line is parsed")


def _require_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    parent = folder.absolute().parent
    siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    raise RunNotFoundError(f"there is no folder {folder}{did_you_mean(folder.name, siblings)}")


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))
