"""The command `comgra-decl export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line

if TYPE_CHECKING:
    from comgra_decl.query import Circuit, EdgeEffects

PANEL = "Keep"


def command(
    run: RunPath,
    target: Annotated[Path, typer.Argument(help="File or folder to create.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="Format: parquet, csv, zarr, npz, trace or tensorboard; for the graph onnx, "
            "graphml, json, dot or mermaid.",
        ),
    ] = "parquet",
    nodes: Annotated[
        str | None,
        typer.Option(help="Nodes to export, as a pattern: 'blocks.*'. Empty: metrics only."),
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", help="Pass to export, such as grad. Can be repeated. TensorBoard."),
    ] = None,
    statistic: Annotated[
        list[str] | None,
        typer.Option(help="Statistic to export, such as std. Can be repeated. TensorBoard."),
    ] = None,
    series: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of series; by default 200. TensorBoard."),
    ] = None,
    circuit: Annotated[
        str | None,
        typer.Option(
            help="Intervention whose paths are the graph. Its format is dot, mermaid, json or "
            "graphml."
        ),
    ] = None,
    on_graph: Annotated[
        bool,
        typer.Option(
            "--on-graph",
            help="With --circuit: the recorded graph, reduced to the edges through which paths "
            "lead. --above then means the sum of their effects.",
        ),
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Step of the circuit; by default the last one.")
    ] = None,
    above: Annotated[
        float, typer.Option(min=0.0, help="Omit paths, or edges, whose effect is not larger.")
    ] = 0.0,
    strongest: Annotated[
        int | None, typer.Option(min=1, help="Largest number of paths of the circuit.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Trace that the program wrote with torch.profiler, to join with a trace."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a run for other programs: tables, arrays, a trace, TensorBoard logs or the graph.

    A trace is a time line of records, metrics and profiled steps for Perfetto or Chrome.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.export import export_run
    from comgra_decl.query import open_run
    from comgra_decl.sinks import Selection
    from comgra_decl.spec.sinks import SERIES

    opened = open_run(run)
    selection = Selection(nodes, tuple(passes or ()), tuple(statistic or ()), series or SERIES)
    graph: Circuit | EdgeEffects | None = None
    if on_graph and circuit is None:
        raise typer.BadParameter("--on-graph needs --circuit, the intervention")
    if profile is not None and not profile:
        raise typer.BadParameter("--profile must be a non-empty path, such as trace.json")
    if circuit is not None:
        make = opened.edge_effects if on_graph else opened.circuit
        graph = make(circuit, step, above=above, strongest=strongest)
    with bar() as on_progress:
        written = export_run(
            opened,
            target,
            format_,
            selection=selection,
            circuit=graph,
            profile=None if profile is None else Path(profile),
            progress=on_progress,
        )
    if as_json:
        print_json({"path": str(written), "source": str(opened.path), "format": format_})
    else:
        print_line(str(written))
