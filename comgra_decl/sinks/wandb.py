"""Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import needed

from .api import About, Moment
from .graph import Graph, plain
from .points import Points

EXTRA = "wandb"
STEP = "comgra/step"
"""The metric that holds the training step; W&B's own step counts calls of `log`."""

LINK = "comgra"
"""Key of the link to the run in W&B's configuration."""

ARTIFACT = "comgra-run"
"""Type of the artifact that is a copy of the run."""

_MOST_BINS = 512  # more are refused by W&B


class WandbSink:
    """Log to a new W&B run, beside any that the program has.

    The program's own run remains as it is: its steps, its charts and `wandb.run`. The new run names
    it in its configuration. W&B accepts all names and tells NaN and both infinities apart, so
    nothing is encoded.

    Raises:
        MissingPackageError: W&B is not installed.
    """

    def __init__(
        self, project: str | None = None, *, entity: str | None = None, mode: str | None = None
    ) -> None:
        self._wandb = needed("wandb", EXTRA)
        self._project, self._entity, self._mode = project, entity, mode
        self._artifact = ""
        self._run: Any = None

    def begin(self, about: About) -> None:
        """Create the run with the settings, the run's path and the id of the program's W&B run."""
        self._artifact = about.artifact
        link = {"run": about.path, "name": about.name, "group": about.group}
        if self._wandb.run is not None:
            link["program_run"] = self._wandb.run.id
        self._run = self._wandb.init(
            project=self._project or about.group,
            entity=self._entity,
            mode=self._mode,
            name=about.name,
            config=about.settings | {LINK: link},
            reinit="create_new",
            settings=self._wandb.Settings(console="off"),  # it would capture the program's output
        )
        self._run.define_metric(STEP, hidden=True, summary="max")  # texts come after all numbers
        self._run.define_metric("*", step_metric=STEP)

    @property
    def link(self) -> dict[str, str]:
        """Where the W&B run is found."""
        where = self._run.url or self._run.dir
        return {"id": str(self._run.id), "project": str(self._run.project), "where": str(where)}

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        """Log numbers together."""
        self._run.log({STEP: at.step, **values})

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        """Log a histogram with its own edges; pairs of bins are joined while there are over 512.

        W&B has one kind of data per name, and a tensor's series have longer names.
        """
        while len(counts) > _MOST_BINS:
            padded = np.append(counts, [0] * (len(counts) % 2))
            counts = padded.reshape(-1, 2).sum(axis=1)
            edges = np.append(edges[:-1:2], edges[-1])
        found = self._wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
        self._run.log({STEP: at.step, name: found})

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        """Log a picture."""
        self._run.log({STEP: at.step, name: self._wandb.Image(pixels)})

    def text(self, at: Moment, name: str, text: str) -> None:
        """Log a text as HTML, which W&B shows beside the charts."""
        from html import escape

        body = self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)
        self._run.log({STEP: at.step, name: body})

    def graph(self, at: Moment, graph: Graph) -> None:
        """Store the graph in the run's summary."""
        self._run.summary["comgra_graph"] = plain(graph)

    def points(self, records: Sequence[Points]) -> None:
        """Do nothing: only TensorBoard has a projector."""

    def artifact(self, folder: Path) -> None:
        """Store the run as an artifact of type `comgra-run`."""
        artifact = self._wandb.Artifact(self._artifact, type=ARTIFACT)
        artifact.add_dir(str(folder), policy="mutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def end(self, state: str) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if state == "finished" else 1)
