"""Send a finished run to a tracker, as `sinks` does during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import ComgraError, StoreError, UnknownNameError, did_you_mean, shown
from comgra_decl.records import ENDED
from comgra_decl.sinks import Selection, Sink
from comgra_decl.sinks.making import maker_of, selection_of
from comgra_decl.spec import load_spec
from comgra_decl.spec.sinks import ArtifactOptions
from comgra_decl.store.copying import copy_run
from comgra_decl.store.last_seen import remove_last_seen

from .content import Content
from .forwarding import about, forward

if TYPE_CHECKING:
    from comgra_decl.query import Run

TOOLS = ("wandb", "mlflow", "trackio")
"""The tools that a finished run can be sent to."""


def send_run(
    run: Run,
    tool: str,
    options: Mapping[str, Any] | None = None,
    *,
    selection: Selection | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, str]:
    """Send a run that has ended to W&B, MLflow or trackio, as a new run of the tool.

    The program's MLflow run is used if one is active and `uri` is not among the options.

    Args:
        run: an open run.
        tool: one of `TOOLS`.
        options: options of the tool, as in `sinks` of a spec: `{"project": "vision"}`.
        selection: the series to send; None: as the options say.
        progress: called with the current action, the amount done, and the total.

    Returns:
        Where the tool has the run, such as `{"id": "...", "project": "...", "where": "..."}`.

    Raises:
        UnknownNameError: there is no such tool, or a selected node or statistic does not exist.
        SpecError: an option is unknown or invalid.
        SelectionError: too many series are selected; the message proposes a selection.
        MissingPackageError: the tool is not installed; the message names the extra.
        StoreError: the run is still being recorded, or the tool refused it.
    """
    if tool not in TOOLS:
        raise UnknownNameError(
            f"a run cannot be sent to {shown(tool)}{did_you_mean(tool, TOOLS) or '.'} Choose one "
            f"of {', '.join(TOOLS)}; see `export` for files of other tools."
        )
    (spec,) = load_spec({"sinks": [{tool: dict(options or {})}]}).sinks
    if run.state not in ENDED:
        raise StoreError(f"{run.name!r} is still being recorded; send it when it has ended.")
    chosen = selection or replace(selection_of(spec.options), in_spec=False)
    content = Content(run, selection=chosen, progress=progress)
    told = about(run, content.statistics)
    sink = maker_of(spec, told, base=Path())()
    state = "failed"
    try:
        forward(content, sink)
        link = dict(sink.link)
        if isinstance(spec.options, ArtifactOptions) and spec.options.artifact:
            _send_copy(run, sink)
        state = run.state
    except ComgraError:
        raise
    except Exception as error:
        raise StoreError(f"{tool} refused the run ({type(error).__name__}: {error})") from error
    finally:
        sink.end(state)
    return link


def _send_copy(run: Run, sink: Sink) -> None:
    """Send a compact copy of a run."""
    with TemporaryDirectory(prefix="comgra-") as folder:
        copied = Path(folder, "run")
        copy_run(run.path, copied, compact=True)
        remove_last_seen(copied)
        sink.artifact(copied)
