"""The command `comgra-decl import`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comgra_decl.cli.printing import AsJson, Everything, print_json, print_line

if TYPE_CHECKING:
    from comgra_decl.importing import Imported

PANEL = "Keep"


def command(
    logs: Annotated[
        Path, typer.Argument(help="Log folder of TensorBoard, as for its --logdir, or event file.")
    ],
    target: Annotated[
        Path, typer.Argument(help="Group folder for the runs, such as runs/mnist; may exist.")
    ],
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Import TensorBoard's logs as runs, to compare them with recorded ones.

    Each folder with event files becomes a run with its scalars (as metrics), hyperparameters and
    texts. Runs are never overwritten, and appear only when all of them are complete. JSON of more
    than 20 kB is shortened; "left_out" tells what is missing.
    """
    from comgra_decl.cli.printing import bar
    from comgra_decl.importing import import_tensorboard

    with bar() as on_progress:
        runs = import_tensorboard(logs, target, progress=on_progress)
    if as_json:
        content = {"runs": [_described(run) for run in runs]}
        print_json(content, everything=everything)
        return
    for run in runs:
        print_line(
            f"{run.path}  metrics: {run.metrics:,} ({run.values:,} values), "
            f"settings: {run.settings:,}, notes: {run.notes:,}{_without(run.left_out)}"
        )


def _described(run: Imported) -> dict[str, object]:
    counts = {name: getattr(run, name) for name in ("values", "metrics", "settings", "notes")}
    return {
        "path": str(run.path),
        "source": str(run.source),
        **counts,
        "left_out": dict(run.left_out),
    }


def _without(left_out: Mapping[str, int]) -> str:
    listed = ", ".join(f"{kind}: {count:,}" for kind, count in left_out.items())
    return f"; not imported: {listed}" if listed else ""
