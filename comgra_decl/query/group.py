"""Open several runs together."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pandas as pd

from comgra_decl.errors import (
    StoreError,
    UnknownNameError,
    did_you_mean,
    is_one_of,
    needed,
    shown,
)
from comgra_decl.store import small_cache
from comgra_decl.store.location import Location, Where, location

from .compare import Tensor, compare_each, differences_of, unique_names
from .display import from_viewer
from .index import FILE, Index, Line
from .listing import RunSummary, below, facts_of, is_run, listed
from .opening import require_folder
from .overview import RunRow, overview_of, row_in, settings_in
from .run import Run
from .snapshot import aggregate
from .statistics import LEVELS
from .tables import table_html

if TYPE_CHECKING:
    import polars as pl

_OPEN = 8
"""Number of runs that a group holds open: the ones last used."""


def open_group(path: Where) -> Group:
    """Open all runs below a folder or a location in a bucket.

    Raises:
        RunNotFoundError: the folder does not exist, or cannot be read.
        StoreError: the bucket cannot be reached.
    """
    place = location(path)
    require_folder(place)
    return Group(place)


class Group:
    """The readable runs below a folder, oldest first; each is opened when it is used.

    ```python
    for run in open_group("runs/train"):
        print(run.name, run.series("head", "std").iloc[-1])
    ```
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        self._index = Index(path)
        self._opened: OrderedDict[Location, Run] = OrderedDict()
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

    @property
    def unique_names(self) -> list[str]:
        """Names of the readable runs, oldest first; if two are equal, with their groups."""
        return unique_names(self._readable)

    def refresh(self) -> bool:
        """Look for new runs; return whether the list has changed."""
        before, self.runs = self.runs, listed(self._index)
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
        tensor = Tensor(node, role, of, iteration, statistic, over_batch, type)
        return compare_each(unique_names(self._readable), self._one_by_one(), tensor)

    def differences(self) -> pd.DataFrame:
        """Return the settings in which the runs differ: one row per setting, one column per run.

            run                    lr_1e-3  lr_1e-2
            setting
            config.optimizer.lr      0.001     0.01

        <NA> where a run lacks the setting; see `comgra_decl.query.differences`.
        """
        readable = self._readable
        with small_cache():
            settings = [settings_in(self._index, run) for run in readable]
        return differences_of(dict(zip(unique_names(readable), settings, strict=True)))

    def overview(self) -> pd.DataFrame:
        """Return a table with one row per run: facts, metrics and changed settings.

                         state  steps  last.loss  best.loss  errors  ...  config.optimizer.lr
            run
            lr_1e-3   finished    200     0.3121     0.3067       0  ...                0.001

        See `comgra_decl.query.overview`. The rows of runs that have ended are computed once and
        kept in the index of the folder.
        """
        return overview_of(self._rows())

    def table(
        self,
        *names: str,
        nodes: str | Sequence[str] = "**",
        of: str | None = None,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pl.LazyFrame:
        """Return statistics of many tensors in all runs as a lazy table of Polars.

        The columns are "run", and those of `Run.table`. Nothing is read before `collect`, and then
        one run after the other, so that only rows that pass the filters are held in memory. A run
        that lacks a statistic, the pass or the nodes has no rows.

        Args:
            names: names of the statistics.
            nodes: globs over the names of nodes, such as "blocks.**".
            of: the pass: "forward", "grad", ...; None: all passes.
            over_batch: "mean", "std" or "abs_max".
            type: type of execution; None: training.

        Raises:
            MissingPackageError: polars is not installed; the message names the extra to install.
            UnknownNameError: there is no such aggregate over the batch.
        """
        aggregate(over_batch)
        polars = needed("polars", "queries")
        plugins = needed("polars.io.plugins", "queries")
        text, whole = polars.String, polars.Int64
        schema = {"run": text, "step": whole, "node": text, "role": text, "iteration": whole}
        schema |= {"pass": text} | dict.fromkeys(names, polars.Float32)
        options = {"nodes": nodes, "of": of, "over_batch": over_batch, "type": type}
        runs = list(zip(unique_names(self._readable), self._readable, strict=True))

        def source(
            columns: list[str] | None, predicate: Any, most: int | None, _batch: int | None
        ) -> Iterator[Any]:
            for name, summary in runs:
                found = _table(summary.path, names, options)
                content = {"run": [name] * len(found), **{c: found[c].tolist() for c in found}}
                part = polars.DataFrame(content, schema=schema)
                part = part if predicate is None else part.filter(predicate)
                part = part if columns is None else part.select(columns)
                yield part if most is None else part.head(most)
                most = None if most is None else most - len(part)
                if most is not None and most <= 0:
                    return

        lazy: pl.LazyFrame = plugins.register_io_source(source, schema=schema)
        return lazy

    def index(self, to: str | os.PathLike[str] | None = None) -> str:
        """Write the facts of all readable runs to a Parquet file; return where it is.

        One row per run, with the columns of `overview` and "run", its path below the folder. Each
        setting of the programs is a column "config.NAME" or "argument.NAME", and settings of the
        spec that differ are "spec.NAME". Lists are JSON. Runs that have not ended are as they are
        now.

        Args:
            to: the file; None: the index that lists of the folder use, ".comgra-index.parquet".

        Raises:
            MissingPackageError: pyarrow is not installed.
            StoreError: the file cannot be written, or the folder is a run.
        """
        where = self.path / FILE if to is None else location(to)
        if to is None and is_run(self.path):
            raise StoreError(
                f"{str(self.path)!r} is a run. Pass the folder that contains the runs, or a file "
                "to write to."
            )
        needed("pyarrow", "parquet")
        rows = dict(zip([run.path for run in self._readable], self._rows().values(), strict=True))
        others = {
            below(self.path, run.path): Line("", (), facts_of(run), rows[run.path])
            for run in self._readable
        }
        return self._index.write(where, others)

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

    def _rows(self) -> dict[str, RunRow]:
        """Return the row of each readable run, by its name."""
        readable = self._readable
        with small_cache():
            rows = [row_in(self._index, run) for run in readable]
        self._index.save()
        return dict(zip(unique_names(readable), rows, strict=True))

    def _one_by_one(self) -> Iterator[Run]:
        """Yield the readable runs, none of which stays open."""
        for run in self._readable:
            with small_cache():
                opened = Run(run.path)
            yield opened

    def _open(self, path: Location) -> Run:
        if path not in self._opened:
            self._opened[path] = Run(path)
            while len(self._opened) > _OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(path)
        return self._opened[path]

    def __repr__(self) -> str:
        return f"<Group {str(self.path)!r}: {len(self)} runs>"

    def _repr_html_(self) -> str:
        rows = [(r.name, r.state, str(r.records), r.error or "") for r in self.runs]
        return table_html(f"Group {self.name}", ("run", "state", "records", "problem"), rows)


def _table(path: Location, names: Sequence[str], options: Mapping[str, Any]) -> pd.DataFrame:
    """Return statistics of a run; an empty table if it lacks what is wanted."""
    with small_cache(), suppress(UnknownNameError):
        return Run(path).table(*names, **options)
    return pd.DataFrame({name: [] for name in ("step", *LEVELS, *names)})
