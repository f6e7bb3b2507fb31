"""Open several runs together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from comgra_decl.errors import RunNotFoundError, UnknownNameError, did_you_mean, is_one_of, shown
from comgra_decl.store.location import Location, Remote, Where, location

from .compare import compare, differences
from .display import from_viewer
from .listing import RunSummary, list_runs
from .overview import overview
from .run import Run
from .tables import table_html


def open_group(path: Where) -> Group:
    """Open all runs below a folder or a location in a bucket.

    Raises:
        RunNotFoundError: the folder does not exist.
        StoreError: the bucket cannot be reached.
    """
    place = location(path)
    if not isinstance(place, Remote) and not place.is_dir():
        raise RunNotFoundError(f"folder {str(path)!r} does not exist.")
    return Group(place)


class Group:
    """The readable runs below a folder, oldest first; each is opened on first access.

    ```python
    for run in open_group("runs/train"):
        print(run.name, run.series("head", "std").iloc[-1])
    ```
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self._opened: dict[Location, Run] = {}
        self.runs: list[RunSummary] = []
        self.refresh()

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.absolute().name

    @property
    def names(self) -> list[str]:
        """Names of the readable runs, oldest first."""
        return [run.name for run in self._readable]

    def refresh(self) -> bool:
        """Look for new runs; return whether the list has changed."""
        before, self.runs = self.runs, list_runs(self.path)
        return before != self.runs

    def __len__(self) -> int:
        return len(self._readable)

    def __iter__(self) -> Iterator[Run]:
        for run in self._readable:
            yield self._open(run.path)

    def __getitem__(self, key: str | int) -> Run:
        """Return a run by its name or by its index (-1 is the newest)."""
        readable = self._readable
        if isinstance(key, int):
            return self._open(readable[key].path)
        for run in reversed(readable):
            if is_one_of(key, [run.name]):
                return self._open(run.path)
        raise UnknownNameError(
            f"no run in {str(self.path)!r} is called {shown(key)}{did_you_mean(key, self.names)}."
        )

    def compare(
        self,
        node: str,
        statistic: str = "mean",
        *,
        role: str = "output",
        of: str = "forward",
        iteration: int = 0,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.DataFrame:
        """Return a statistic of one tensor across all runs: one row per step, one column per run.

            run        lr_1e-3   lr_1e-2
            step
            0         0.581002  0.581002
            10        0.603418  1.190233

        NaN where a run did not record the step or lacks the tensor; see
        `comgra_decl.query.compare`.
        """
        return compare(
            self,
            node,
            statistic,
            role=role,
            of=of,
            iteration=iteration,
            over_batch=over_batch,
            type=type,
        )

    def differences(self) -> pd.DataFrame:
        """Return the settings in which the runs differ: one row per setting, one column per run.

            run                    lr_1e-3  lr_1e-2
            setting
            config.optimizer.lr      0.001     0.01

        <NA> where a run lacks the setting; see `comgra_decl.query.differences`.
        """
        return differences(self)

    def overview(self) -> pd.DataFrame:
        """Return a table with one row per run: facts, metrics and changed settings.

                         state  steps  last.loss  best.loss  errors  ...  config.optimizer.lr
            run
            lr_1e-3   finished    200     0.3121     0.3067       0  ...                0.001

        See `comgra_decl.query.overview`.
        """
        return overview(self)

    @property
    def plot(self) -> Any:
        """Plots of these runs as HoloViews elements, which compose with `+` and `*`.

        Its methods are `kpi`, `series` and `settings`.

        Raises:
            MissingPackageError: no viewer is installed.
        """
        return from_viewer("plot")(self)

    @property
    def _readable(self) -> list[RunSummary]:
        return [run for run in self.runs if run.state not in ("damaged", "unreadable")]

    def _open(self, path: Location) -> Run:
        if path not in self._opened:
            self._opened[path] = Run(path)
        return self._opened[path]

    def __repr__(self) -> str:
        return f"<Group {str(self.path)!r}: {len(self)} runs>"

    def _repr_html_(self) -> str:
        rows = [(r.name, r.state, str(r.records), r.error or "") for r in self.runs]
        return table_html(f"Group {self.name}", ("run", "state", "records", "problem"), rows)
