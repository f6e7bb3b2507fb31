"""One run, as a person asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import MissingPackageError, is_one_of
from comgra_decl.records import Structure
from comgra_decl.store.checks import NotedCheck
from comgra_decl.store.parts import Part

from . import arrays, derived, graphs, statistics
from .arrays import Arrays
from .chunks import Chunk, chunks
from .run_facts import RunFacts
from .slot import Slot
from .tables import findings_table, table_html

if TYPE_CHECKING:
    import xarray


class Run(RunFacts):
    """A recorded run: everything it holds, loaded when asked for.

    What it shows is as of the last `refresh` (or of its opening); a live run grows only then.
    Safe to use from several threads.

    `slot` gives a handle on one recorded tensor. `type` chooses the records by type of execution
    (or by tag), where None means those in train mode (all records, if none is); `over_batch` is how
    per-sample statistics were aggregated over the batch: "mean", "std" or "abs_max". In every table
    NaN means that nothing was recorded; a tensor that held NaN or infinities has a `nonfinite`
    above 0.
    """

    # -- what it holds

    @property
    def records(self) -> pd.DataFrame:
        """All records: step, type, mode, time, structure, batch_size, cost (seconds), kept.

        `kept` says why a trigger of the spec's `keep` made a record be kept, None if none did.
        """
        return self._snapshot.records_table.copy()

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps of the records in train mode, ascending."""
        snapshot = self._snapshot
        if "train" not in snapshot.view.names("mode"):
            return np.empty(0, np.int64)
        return np.sort(snapshot.steps[snapshot.records(None)])

    @property
    def types(self) -> list[str]:
        """Types of execution, in order of first appearance."""
        return list(self._snapshot.types)

    @property
    def tags(self) -> list[str]:
        """Labels that records have beside their type, in order of first appearance."""
        return list(self._snapshot.tags)

    @property
    def nodes(self) -> list[str]:
        """Nodes, in order of first appearance."""
        return list(self._snapshot.nodes)

    @property
    def slots(self) -> pd.DataFrame:
        """All slots: node, role, iteration, pass, kind, dtype, shape, batch_dim, ...

        `shape` is that of the first record; `Slot.shapes` has that of each.
        """
        return self._snapshot.slots_table.copy()

    @property
    def statistics(self) -> list[str]:
        """Names of the recorded statistics, then of those made of them: `update_ratio`."""
        return [*self._reader.meta.statistics, *derived.offered(self._snapshot)]

    @property
    def sample_count(self) -> int:
        """Number of samples recorded individually."""
        return self._reader.meta.sample_count

    @property
    def bins(self) -> int | None:
        """Number of bins of a histogram, None if the run has none."""
        return self._reader.meta.bins

    def kpis(self) -> pd.DataFrame:
        """Returns the numbers of all steps: step, type, name, value; one line per value.

        Losses ("loss", "loss[1]", ...) and what `comgra.kpi` was told, also of steps that are no
        records.
        """
        return self._snapshot.kpis_table.copy()

    def notes(self) -> pd.DataFrame:
        """Returns the notes of the run, in order: step, type, time (unix seconds), text."""
        return self._snapshot.notes_table.copy()

    def findings(self) -> pd.DataFrame:
        """Returns what the rules found while the run was recorded, best first; one line each.

        rule, severity, node, role, iteration, pass (None where it is about the run as a whole),
        first_step, last_step, message, advice, also (how many further tensors show it), because
        (the rule that explains it, if any), after_step (the last step known to be free of it: it
        began after this one and by first_step). `comgra_decl.rules.diagnose` looks again.
        """
        return findings_table(self._snapshot.view.document("findings"))

    def experiments(self) -> list[NotedCheck]:
        """Returns the verdicts of experiments with the script that were noted beside the run.

        `comgra-decl overfit-one-batch --for RUN` and `batch-mixing --for RUN` note theirs. One that
        cannot be read is left out; `damage` says so, `noted` why.
        """
        return list(self.noted().verdicts)

    def document(self, name: str) -> Any:
        """Returns the newest document of a name as it was stored, None where there is none.

        "modules", "report", and "findings", which `comgra_decl.rules.stored` reads.
        """
        return self._snapshot.view.document(name) if is_one_of(name, [name]) else None

    def chunks(self) -> Iterator[Chunk]:
        """Yields all records in the order in which they were stored, some at a time.

        For whoever looks at everything, as the rules do, in little memory.
        """
        return chunks(self._snapshot)

    # -- its graph

    def structure(self, step: int | None = None, *, type: str | None = None) -> Structure | None:
        """Returns the dependency graph valid at a step (None: at the last), if there is one."""
        return graphs.structure(self._snapshot, step, type)

    def structure_hash(self, step: int | None = None, *, type: str | None = None) -> str | None:
        """Returns the hash of that graph; the same graph has the same hash in any run."""
        return graphs.structure_hash(self._snapshot, step, type)

    def edges(self, step: int | None = None, *, type: str | None = None) -> list[tuple[str, str]]:
        """Returns (source node, sink node) of the graph valid at a step, each pair once.

        Connections within a node are left out; `structure` has them. A tensor of an earlier step
        that is used again is a node of its own, "cell (earlier step)".
        """
        return graphs.edges(self._snapshot, step, type)

    # -- its statistics

    def cuts(self, step: int | None = None, *, type: str | None = None) -> list[str]:
        """Where values left torch, so that the graph at a step could not be followed further.

        Each is a node and the call through which its values left: `head.item()`. What the
        program computed from them, if anything, has no edge from that node.
        """
        graph = self.structure(step, type=type)
        return [] if graph is None else list(graph.cuts)

    def slot(
        self, node: str, *, role: str = "output", of: str = "forward", iteration: int = 0
    ) -> Slot:
        """Returns one recorded tensor, which has the series, values and histograms of it.

        Args:
            node: a module path or an annotated name.
            role: "output", "input", the name of a parameter, ...
            of: the pass: "forward", "grad", "update", ...
            iteration: which call of the node within the step, counting from 0.

        Raises:
            UnknownNameError: no such slot was ever recorded; names near ones.
        """
        key = self._snapshot.slot(node, role, iteration, of).key
        return Slot(lambda: self._snapshot, key)

    def __getitem__(self, node: str) -> Slot:
        """Returns the output of a node, as `slot(node)` does."""
        return self.slot(node)

    def series(
        self,
        node: str,
        statistic: str = "mean",
        *,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.Series[float]:
        """Returns one statistic of a node's output by step: `slot(node).series(statistic)`."""
        return self.slot(node).series(statistic, over_batch=over_batch, type=type)

    def value(
        self,
        node: str,
        step: int,
        *,
        sample: int | None = None,
        part: Part = ...,
        type: str | None = None,
    ) -> NDArray[Any]:
        """Returns the recorded values of a node's output: `slot(node).value(step)`."""
        return self.slot(node).value(step, sample=sample, part=part, type=type)

    def row(self, step: int, *, over_batch: str = "mean", type: str | None = None) -> pd.DataFrame:
        """Returns all statistics of all slots recorded at a step, a row per slot.

        The index has the levels node, role, iteration and pass:

                                                mean       std        l2 ...
            node  role   iteration pass
            embed output 0         forward  0.013201  1.002241  5.672901
            head  output 0         forward -0.104114  0.581002  1.180234
                                   grad     0.000000  0.021250  0.042500
        """
        return statistics.row(self._snapshot, step, type, over_batch)

    def shapes(self, step: int, *, type: str | None = None) -> pd.Series[Any]:
        """Returns the shapes of all slots recorded at a step, with the index that `row` has."""
        return statistics.shapes(self._snapshot, step, type)

    @property
    def reshaped(self) -> bool:
        """Whether any tensor had another shape in some record than in its first one."""
        return self._snapshot.view.reshaped

    def samples(self, step: int, *, type: str | None = None) -> pd.DataFrame:
        """Returns the samples recorded individually at a step: index sample number.

        `place` is a sample's place in the batch, `label` its category, None where it has none.
        """
        snapshot = self._snapshot
        record = snapshot.record(step, type)
        places = snapshot.view.samples(record)
        labels = snapshot.view.extra(record).get("labels") or [None] * len(places)
        index = pd.RangeIndex(len(places), name="sample")
        return pd.DataFrame({"place": places, "label": pd.Series(labels, index, object)}, index)

    def heat(
        self,
        statistic: str,
        *,
        of: str = "forward",
        over_batch: str = "mean",
        type: str | None = None,
    ) -> pd.DataFrame:
        """Returns one statistic of all slots of a pass: a row per step, a column per slot.

        The columns have the levels node, role, iteration and pass:

            node          embed      head
            role         output    output
            iteration         0         0
            pass        forward   forward
            step
            0          5.672901  1.180234
            1          5.671177  1.094518
        """
        return statistics.heat(self._snapshot, statistic, of, over_batch, type)

    def to_xarray(
        self,
        *names: str,
        of: str | None = None,
        over_batch: str = "mean",
        type: str | None = None,
    ) -> xarray.Dataset:
        """Returns statistics as an `xarray.Dataset` with the dims step and slot.

        `node`, `role`, `iteration` and `pass` are coordinates of the dim slot.

        Args:
            names: the statistics; none: all that were recorded.
            of: only the slots of this pass: "forward", "grad", ...; None: all slots.
            over_batch: "mean", "std" or "abs_max".
            type: type of execution; None: training.

        Raises:
            MissingPackageError: xarray is not installed; names the extra that brings it.
            UnknownNameError: no such statistic or pass.
        """
        wanted = names or self._reader.meta.statistics
        return arrays.dataset(self._snapshot, wanted, of, over_batch, type)

    # -- its tensors, by slot id

    def values_of(self, record: int) -> dict[int, NDArray[Any]]:
        """Returns all values [samples, ...] that a record (see `records`) holds, by slot id."""
        view = self._snapshot.view
        found = {slot: view.value(record, slot) for slot in view.value_slots(record)}
        return {slot: value for slot, value in found.items() if value is not None}

    @property
    def arrays(self) -> Arrays:
        """The same as numpy arrays by slot id, for programs that read much of a run."""
        return Arrays(self._snapshot)

    # -- how it shows itself

    def view(self, pane: str | None = None, **at: Any) -> Any:
        """Returns the viewer of this run, or one pane of it, to be shown in a notebook.

        It shows the run as of the last `refresh`; `comgra-decl view` follows one that is being
        recorded. Clicks work as in the viewer. `run.view("graph").save("graph.html")` writes it
        into a file that needs nothing else.

        Args:
            pane: None for all of it; "graph", "steps", "statistics", "series", "distribution",
                "values"; or a section: "overview", "inspect", "kpis", "modules", "notes", ...
            **at: What to look at, by the names that the other methods have: `node`, `role`,
                `step` (the nearest recorded one), `of`, `iteration`, `statistic`, `type`,
                `over_batch` or `sample`; `colour="grad"` paints the graph with the statistic of a
                pass, `scale="log"` is for series, and `height` is in pixels.

        Raises:
            MissingPackageError: no viewer is installed.
            UnknownNameError: there is no such pane, argument, node, role, statistic, ...
        """
        for entry in entry_points(group="comgra_decl.viewer", name="notebook"):
            return entry.load()(self, pane, **at)
        raise MissingPackageError(
            "no viewer is installed: install comgra-decl itself, not only its files (pip install .)"
        )

    def _repr_html_(self) -> str:
        steps = self.steps
        began = datetime.fromtimestamp(self.started, UTC).astimezone()
        rows = [
            ("state", self.state if self.error is None else f"{self.state}: {self.error}"),
            ("records", f"{self._snapshot.view.n} ({', '.join(self.types) or 'none yet'})"),
            ("steps", f"{steps[0]} to {steps[-1]}" if len(steps) else "none yet"),
            ("nodes", str(len(self.nodes))),
            ("slots", str(len(self._snapshot.view.slots))),
            ("statistics", ", ".join(self.statistics)),
            ("started", f"{began:%Y-%m-%d %H:%M:%S}"),
            ("folder", str(self.path)),
        ]
        return table_html(f"Run {self.group}/{self.name}", ("", ""), rows)
