"""Create the sinks that a spec declares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comgra_decl.errors import ComgraError
from comgra_decl.spec.sinks import (
    MlflowOptions,
    SinkOptions,
    SinkSpec,
    TensorBoardOptions,
    TrackioOptions,
    WandbOptions,
)
from comgra_decl.store.location import Location

from .api import About, Sink
from .selection import Selection

TENSORBOARD = "tensorboard"
"""Folder of the event files in a run's folder."""


def about_of(
    place: Location, config: dict[str, Any] | None, started: float, statistics: Sequence[str]
) -> About:
    """Return the facts about a run that sinks show."""
    path = place.absolute()
    names = path.name, path.parent.name
    return About(*names, str(path), started, config or {}, tuple(statistics))


def selection_of(options: SinkOptions) -> Selection:
    """Return the selection that a spec declares."""
    return Selection(
        options.nodes,
        tuple(options.passes),
        tuple(options.statistics),
        options.series,
        options.histograms,
        options.pictures,
        in_spec=True,
    )


def maker_of(spec: SinkSpec, about: About, *, base: Path) -> Callable[[], Sink]:
    """Return a function that creates the sink and imports its tool.

    Call this on the program's thread, where MLflow tells the program's active run.

    Args:
        spec: the tool and its options.
        about: facts about the run.
        base: the folder to which paths are relative.
    """
    options = spec.options
    folder = None
    if isinstance(options, TensorBoardOptions) and options.folder is not None:
        folder = base.absolute() / Path(options.folder).expanduser()
    program_run = None
    if isinstance(options, MlflowOptions) and options.uri is None:
        program_run = _active_mlflow_run()

    def make() -> Sink:
        if isinstance(options, TensorBoardOptions):
            from .tensorboard import TensorBoardSink

            if folder is None and "://" in about.path:
                raise ComgraError(
                    "TensorBoard's files cannot be written to a bucket; set `folder`, as in "
                    "`sinks: [{tensorboard: {folder: logs/run}}]`"
                )
            return TensorBoardSink(folder or Path(about.path) / TENSORBOARD)
        if isinstance(options, WandbOptions):
            from .wandb import WandbSink

            return WandbSink(options.project, entity=options.entity, mode=options.mode)
        if isinstance(options, MlflowOptions):
            from .mlflow import MlflowSink

            return MlflowSink(options.uri, experiment=options.experiment, run=program_run)
        assert isinstance(options, TrackioOptions)
        from .trackio import TrackioSink

        return TrackioSink(options.project)

    return make


def _active_mlflow_run() -> str | None:
    """Return the id of the MLflow run that is active on this thread; imports nothing."""
    active_run = getattr(sys.modules.get("mlflow"), "active_run", None)
    run = None if active_run is None else active_run()
    return None if run is None else str(run.info.run_id)
