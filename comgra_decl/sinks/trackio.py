"""trackio: a local database with a dashboard."""

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

EXTRA = "trackio"
LINK = "comgra_run"
"""Key of the path of the run in trackio's configuration."""

ARTIFACT = "comgra-run"
"""Type of the artifact that is a copy of the run."""


class TrackioSink:
    """Log to a new trackio run; accepts all names and non-finite numbers.

    Raises:
        MissingPackageError: trackio is not installed.
    """

    def __init__(self, project: str | None = None) -> None:
        self._trackio = needed("trackio", EXTRA)
        self._project = project
        self._artifact = ""
        self._run: Any = None

    def begin(self, about: About) -> None:
        """Create the run with the settings and the run's path."""
        self._artifact = about.artifact
        self._run = self._trackio.init(
            project=self._project or about.group,
            name=about.name,
            config={**about.settings, LINK: about.path},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @property
    def link(self) -> dict[str, str]:
        """Where the trackio run is found."""
        return {"id": str(self._run.id), "project": str(self._run.project)}

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        """Log numbers together."""
        self._run.log(dict(values), step=at.step)

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        """Log a histogram with its own edges."""
        found = self._trackio.Histogram(np_histogram=(counts, edges))
        self._run.log({name: found}, step=at.step)

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        """Log a picture."""
        self._run.log({name: self._trackio.Image(pixels)}, step=at.step)

    def text(self, at: Moment, name: str, text: str) -> None:
        """Log a text as Markdown."""
        self._run.log({name: self._trackio.Markdown(text)}, step=at.step)

    def graph(self, at: Moment, graph: Graph) -> None:
        """Log the graph as JSON data."""
        self._run.log({"comgra_graph": plain(graph)}, step=at.step)

    def points(self, records: Sequence[Points]) -> None:
        """Do nothing: only TensorBoard has a projector."""

    def artifact(self, folder: Path) -> None:
        """Store the run as an artifact of type `comgra-run`."""
        artifact = self._trackio.Artifact(self._artifact, type=ARTIFACT)
        artifact.add_dir(folder)
        self._run.log_artifact(artifact)

    def end(self, state: str) -> None:
        """End the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
