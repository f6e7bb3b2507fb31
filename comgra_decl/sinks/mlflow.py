"""MLflow: a tracking server or a local database."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import needed

from .api import About, Moment
from .graph import Graph, plain
from .naming import encoded
from .points import Points

EXTRA = "mlflow"
LINK = "comgra.run"
"""Tag with the path of the run."""

ARTIFACT = "comgra/run"
"""Path of the copy of the run among the artifacts."""

_ALLOWED = re.compile(r"[A-Za-z0-9_\-. /]")
_LONGEST = 250  # characters of a name
_LONGEST_VALUE = 500  # of a parameter, in every version
_AT_ONCE = 1000  # metrics of one request
_AT_ONCE_PARAMS = 100
_MOST_NONFINITE = 10_000  # non-finite numbers that are listed


class MlflowSink:
    """Log to an MLflow run of the program or to a new one.

    MLflow replaces infinite numbers by the largest finite ones, and some of its stores drop NaN.
    Such numbers are therefore not sent as metrics but listed in the artifact `comgra/left_out.json`
    as (name, step, "nan", "inf" or "-inf"), the first 10,000 of them. Names that MLflow does not
    accept are encoded; see `naming.decoded`. Settings whose names are longer than MLflow allows are
    not sent, values that are too long are cut and end with an ellipsis, and both are listed in
    `comgra/left_out.json` in full.

    Args:
        uri: the tracking URI; None: as MLflow is set up.
        experiment: the experiment of a new run; None: the group.
        run: id of the program's run, which is neither configured nor ended; None: a new run.

    Raises:
        MissingPackageError: MLflow is not installed.
    """

    def __init__(
        self, uri: str | None = None, *, experiment: str | None = None, run: str | None = None
    ) -> None:
        self._mlflow = needed("mlflow", EXTRA)
        self._entities = needed("mlflow.entities", EXTRA)
        self._client: Any = None
        self._uri, self._experiment = uri, experiment
        self._id = run or ""
        self._own = run is None
        self._nonfinite: list[tuple[str, int, str]] = []
        self._nonfinite_count = 0
        self._texts: Counter[tuple[str, int]] = Counter()
        self._omitted: dict[str, int] = {}
        self._settings: dict[str, str] = {}  # what is too long for a parameter

    def begin(self, about: About) -> None:
        """Create the run, unless the program has one; writes the settings and the run's path."""
        self._client = self._mlflow.MlflowClient(self._uri)
        if self._own:
            name = self._experiment or about.group
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            started = int(about.started * 1000)
            run = self._client.create_run(experiment, start_time=started, run_name=about.name)
            self._id = run.info.run_id
            params = [*self._parameters(about.settings)]
            for first in range(0, len(params), _AT_ONCE_PARAMS):
                part = params[first : first + _AT_ONCE_PARAMS]
                self._client.log_batch(self._id, params=part)
        self._client.set_tag(self._id, LINK, about.path)

    def _parameters(self, settings: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the settings as MLflow's parameters; note those that do not fit."""
        for key, value in settings.items():
            name, text = encoded(key, _ALLOWED), str(value)
            if len(name) > _LONGEST or len(text) > _LONGEST_VALUE:
                self._settings[key] = text
            if len(text) > _LONGEST_VALUE:
                text = text[: _LONGEST_VALUE - 1] + "\N{HORIZONTAL ELLIPSIS}"
            if len(name) <= _LONGEST:  # a name that is cut could be that of another setting
                yield self._entities.Param(name, text)

    @property
    def link(self) -> dict[str, str]:
        """Where the MLflow run is found."""
        return {"id": self._id, "where": self._uri or str(self._mlflow.get_tracking_uri())}

    def scalars(self, at: Moment, values: Mapping[str, float]) -> None:
        """Log the finite numbers in requests of at most 1,000."""
        metrics = []
        for name, value in values.items():
            text = encoded(name, _ALLOWED)
            if len(text) > _LONGEST:
                self._omitted[name] = self._omitted.get(name, 0) + 1
            elif not math.isfinite(value):
                self._nonfinite_count += 1
                if len(self._nonfinite) < _MOST_NONFINITE:
                    self._nonfinite.append((name, at.step, str(value)))
            else:
                time = int(at.time * 1000)
                metrics.append(self._entities.Metric(text, value, time, at.step))
        for first in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[first : first + _AT_ONCE])

    def histogram(
        self, at: Moment, name: str, counts: NDArray[np.int64], edges: NDArray[np.float64]
    ) -> None:
        """Do nothing: MLflow has no histograms."""

    def image(self, at: Moment, name: str, pixels: NDArray[np.uint8]) -> None:
        """Log a picture at its step."""
        image = needed("PIL.Image", EXTRA).fromarray(pixels)
        key, time = encoded(name, _ALLOWED), int(at.time * 1000)
        self._client.log_image(self._id, image, key=key, step=at.step, timestamp=time)

    def text(self, at: Moment, name: str, text: str) -> None:
        """Store a text as an artifact; further texts of the same name and step are numbered."""
        self._texts[name, at.step] += 1
        number = self._texts[name, at.step]
        file = f"step {at.step}" + f" ({number})" * (number > 1)
        self._client.log_text(self._id, text, f"comgra/{encoded(name, _ALLOWED)}/{file}.md")

    def graph(self, at: Moment, graph: Graph) -> None:
        """Store the graph as an artifact."""
        self._client.log_dict(self._id, plain(graph), "comgra/graph.json")

    def points(self, records: Sequence[Points]) -> None:
        """Do nothing: only TensorBoard has a projector."""

    def artifact(self, folder: Path) -> None:
        """Store the run as the artifacts below `comgra/run`."""
        self._client.log_artifacts(self._id, str(folder), ARTIFACT)

    def end(self, state: str) -> None:
        """List what could not be sent, and ends the run, unless it is the program's."""
        client, self._client = self._client, None
        if client is None:
            return
        if self._nonfinite or self._omitted or self._settings:
            content = {
                "nonfinite": self._nonfinite,
                "nonfinite_count": self._nonfinite_count,
                "too_long": self._omitted,
                "settings": self._settings,
            }
            client.log_text(self._id, json.dumps(content, indent=1), "comgra/left_out.json")
        if self._own:
            client.set_terminated(self._id, "FINISHED" if state == "finished" else "FAILED")
