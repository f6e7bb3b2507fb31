"""The command `comgra-decl plot`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line
from comgra_decl.errors import ComgraError

PANEL = "Look"


class View(StrEnum):
    """What can be drawn."""

    GRAPH = "graph"
    HEAT = "heat"
    KPIS = "kpis"
    SERIES = "series"
    SAMPLES = "samples"
    DISTRIBUTION = "distribution"
    HISTOGRAM = "histogram"
    PREVIEW = "preview"
    CLOUD = "cloud"
    PICTURE = "picture"
    LANDSCAPE = "landscape"
    TEXT = "text"
    LENS = "lens"
    ATTENTION = "attention"
    ATTENTION_LINES = "attention-lines"
    ATTENTION_NEURONS = "attention-neurons"
    EMBEDDING = "embedding"
    MEMORY = "memory"
    TIMES = "times"
    EFFECTS = "effects"
    INDUCTION = "induction"
    DISTRIBUTIONS = "distributions"
    RUNS_KPI = "runs-kpi"
    RUNS_SERIES = "runs-series"
    RUNS_SETTINGS = "runs-settings"
    RUNS_PARALLEL = "runs-parallel"


_ANY = inspect.Parameter.VAR_POSITIONAL
_OF_RUNS = {
    View.RUNS_KPI: "kpi", View.RUNS_SERIES: "series", View.RUNS_SETTINGS: "settings",
    View.RUNS_PARALLEL: "parallel",
}  # fmt: skip
"""Views of several runs, and the methods of `Group.plot` that draw them."""

_NAMED = {
    View.PICTURE: "name", View.LANDSCAPE: "name", View.TEXT: "name", View.EFFECTS: "name",
    View.LENS: "name", View.RUNS_KPI: "name", View.RUNS_SETTINGS: "kpi", View.RUNS_PARALLEL: "kpi",
}  # fmt: skip
"""Views with exactly one `--name`, and its parameter."""

_AT_A_STEP = (View.HISTOGRAM, View.PREVIEW)
_OF_A_TENSOR = (View.SERIES, View.SAMPLES, View.DISTRIBUTION, *_AT_A_STEP)
_FLAGS = {"of": "pass", "over_batch": "over-batch", "expanded": "expand", "kpi": "name"}
"""Options whose name differs from that of the parameter."""


def command(
    run: RunPath,
    target: Annotated[
        Path, typer.Argument(help="File to create: .svg, .png, .pdf, or .html to zoom in.")
    ],
    view: Annotated[View, typer.Option("--view", "-v", help="What to draw.")] = View.GRAPH,
    node: Annotated[
        str | None, typer.Option(help="Node of a view of one tensor, or of a picture.")
    ] = None,
    role: Annotated[str, typer.Option(help="Role of the tensor.")] = "output",
    pass_: Annotated[
        str | None, typer.Option("--pass", help="Pass, such as forward (default) or grad:aux.")
    ] = None,
    iteration: Annotated[int, typer.Option(min=0, help="Iteration of the tensor.")] = 0,
    statistic: Annotated[
        str | None,
        typer.Option(help="Statistic, such as std. In a graph, it colours the boxes."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a metric, picture or intervention. Metrics can be repeated; default: all."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step; by default, the last one.")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Number of the sample.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Type of execution or tag.")] = None,
    over_batch: Annotated[
        str | None, typer.Option(help="Aggregate over the batch: mean, std or abs_max.")
    ] = None,
    smoothing: Annotated[
        float | None, typer.Option(min=0, help="Weight of earlier values of metrics, below 1.")
    ] = None,
    strongest: Annotated[
        int | None,
        typer.Option(min=1, help="Number of places of a sweep whose effects to draw by step."),
    ] = None,
    expand: Annotated[
        list[str] | None,
        typer.Option(help="Group to expand in a graph; can be repeated. Default: what is readable"),
    ] = None,
    colour: Annotated[
        str | None,
        typer.Option(
            help="What colours a graph instead of a statistic: time, memory, findings, rule:NAME, "
            "unusual, difference (from --other) or effects:NAME."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting in which runs differ, such as config.lr. For parallel axes, it can be "
            "repeated; default: all."
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Attention head.")] = None,
    query: Annotated[
        int | None, typer.Option(min=0, help="Position of the query of attention-neurons.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of an embedding: pca (default), tsne or umap.")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Bars of the memory: each measured step, or each moment.")
    ] = None,
    x: Annotated[
        str | None, typer.Option("--x", help="Axis of runs-kpi: step, time or samples.")
    ] = None,
    other: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another run for a view of several runs, which can be repeated, or for a graph."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a view of a run to a file: the graph, a heat map, metrics, a tensor or a picture.

    Views that begin with `runs-` draw all runs below a folder or, with `--other`, the runs named.
    Images need Matplotlib, which the extra `plot` installs. An HTML file is self-contained and can
    be zoomed.
    """
    from comgra_decl.query import open_group, open_run

    several = view in _OF_RUNS
    _check_others(view, other or [])
    given = {
        "statistic": statistic,
        "step": step,
        "sample": sample,
        "type": type_,
        "over_batch": over_batch,
        "smoothing": smoothing,
        "strongest": strongest,
        "expanded": expand,
        "of": pass_,
        "node": node,
        "x": x,
        "colour": colour,
        "head": head,
        "query": query,
        "method": method,
        "by": by,
    }
    options: dict[str, Any] = {
        option: value for option, value in given.items() if value is not None
    }
    opened: Any = open_group(run) if several and not other else open_run(run)
    plots: Any
    if several:
        plots = _of_runs([opened, *map(open_run, other)] if other else opened)
    else:
        plots = opened.plot
    if view in _OF_A_TENSOR:
        if node is None:
            raise typer.BadParameter(f"--view {view.value} needs --node")
        plots = opened.slot(node, role=role, of=pass_ or "forward", iteration=iteration).plot
        options = {option: options[option] for option in options if option not in ("of", "node")}
        if view in _AT_A_STEP:
            options.setdefault("step", _last_step(opened))
    elif view is View.GRAPH:
        _check_colours(options)
        if other:
            options["other"] = open_run(other[0])
    elif view is View.CLOUD:
        options.setdefault("step", _last_step(opened))
    element = _drawn(plots, view, names=name or [], settings=setting or [], options=options)
    from comgra_decl.viewer.plotting import save  # after `plot`, which names a missing extra

    try:
        written = save(element, target)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json({"path": str(written), "source": str(opened.path), "view": view.value})
    else:
        print_line(str(written))


def _check_colours(options: Mapping[str, Any]) -> None:
    for option in ("of", "over_batch"):
        if option in options and not options.keys() & {"statistic", "colour"}:
            raise typer.BadParameter(f"--{_FLAGS[option]} of a graph needs --statistic or --colour")


def _last_step(run: Any) -> int:
    if not len(run.steps):
        raise typer.BadParameter("no step was recorded")
    return int(run.steps[-1])


def _check_others(view: View, others: list[Path]) -> None:
    if others and view not in (*_OF_RUNS, View.GRAPH):
        raise typer.BadParameter(f"--view {view.value} has no --other")
    if view is View.GRAPH and len(others) > 1:
        raise typer.BadParameter("--view graph takes only one --other")


def _of_runs(runs: Any) -> Any:
    """Return the plots of several runs, or of a group."""
    from comgra_decl.errors import needed

    needed("panel", "plot")
    from comgra_decl.viewer.plotting import plotted

    return plotted(runs)


def _drawn(
    plots: Any, view: View, *, names: list[str], settings: list[str], options: dict[str, Any]
) -> Any:
    """Return the element that a method of `plots` draws.

    Raises:
        BadParameter: the view has no such option, or needs one more.
    """
    method = getattr(plots, _OF_RUNS.get(view, view.value.replace("-", "_")))
    one, several = view in _NAMED, view is View.RUNS_PARALLEL
    if len(names) > one and view is not View.KPIS:
        most = "only one" if one else "no"
        raise typer.BadParameter(f"--view {view.value} takes {most} --name")
    if len(settings) > 1 and not several:
        raise typer.BadParameter(f"--view {view.value} takes only one --setting")
    if one and names:
        options[_NAMED[view]] = names[0]
    if settings and not several:
        options["setting"] = settings[0]
    _check_options(view, inspect.signature(method).parameters, options)
    try:
        if view is View.KPIS:
            return method(*names, **options, apart=None)
        if several:
            return method(options.pop("kpi"), *settings, **options)
        return method(**options)
    except ComgraError:
        raise
    except ValueError as error:  # an argument, such as the smoothing
        raise typer.BadParameter(str(error)) from error


def _check_options(
    view: View, known: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> None:
    for option in options:
        if option not in known:
            raise typer.BadParameter(f"--view {view.value} has no --{_FLAGS.get(option, option)}")
    for option, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind is not _ANY
        if needed and option not in options:
            raise typer.BadParameter(f"--view {view.value} needs --{_FLAGS.get(option, option)}")
