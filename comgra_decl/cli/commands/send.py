"""The command `comgra-decl send`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line

PANEL = "Keep"


def command(
    run: RunPath,
    tool: Annotated[str, typer.Argument(help="The tool: wandb, mlflow or trackio.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Options of the tool, as in `sinks` of a spec: project=vision, "
            "uri=sqlite:///mlflow.db, artifact=true.",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Nodes to send, as a pattern: 'blocks.*'. Empty: metrics only."),
    ] = None,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", help="Pass to send, such as grad; repeatable.")
    ] = None,
    statistic: Annotated[
        list[str] | None, typer.Option(help="Statistic to send, such as std; repeatable.")
    ] = None,
    series: Annotated[
        int | None, typer.Option(min=1, help="Largest number of series; by default 200.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a run that has ended to W&B, MLflow or trackio.

    It receives what `sinks` in a spec sends during training. If more than 200 series are selected,
    nothing is sent, and a selection is proposed.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.export import send_run
    from comgra_decl.query import open_run
    from comgra_decl.sinks import Selection
    from comgra_decl.spec.sinks import SERIES

    opened = open_run(run)
    selection = Selection(nodes, tuple(passes or ()), tuple(statistic or ()), series or SERIES)
    with bar() as on_progress:
        link = send_run(
            opened, tool, _parsed(options or []), selection=selection, progress=on_progress
        )
    if as_json:
        print_json({"source": str(opened.path), "tool": tool, **link})
    else:
        print_line(" ".join(f"{name}: {value}" for name, value in link.items()))


def _parsed(options: list[str]) -> dict[str, Any]:
    """Return options as a mapping; values are YAML.

    Raises:
        BadParameter: one has no "=", or a value is not YAML.
    """
    found: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if not (equals and name):
            raise typer.BadParameter(f"options are written KEY=VALUE, got {option!r}")
        found[name] = value
    return found
