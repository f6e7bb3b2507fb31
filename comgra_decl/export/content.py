"""Produce the content of an export in pieces, so that long runs need little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError, did_you_mean, shown
from comgra_decl.query import derived
from comgra_decl.records import AGGREGATES
from comgra_decl.sinks import Selection
from comgra_decl.spec.globs import matches

if TYPE_CHECKING:
    from comgra_decl.query import Circuit, EdgeEffects, Run
    from comgra_decl.query.chunks import Chunk

Progress = Callable[[str, int, int], None]

KEYS = ("node", "role", "iteration", "pass")


class Content:
    """Content of a run, optionally limited to nodes that match a pattern.

    A circuit replaces the graph, and effects of edges reduce it to these edges. `profile` is a
    trace of torch.profiler, whose events are added to a trace of the run.
    """

    def __init__(
        self,
        run: Run,
        *,
        selection: Selection | None = None,
        circuit: Circuit | EdgeEffects | None = None,
        profile: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.run = run
        self.circuit = circuit
        self.profile = profile
        self.selection = selection = selection or Selection()
        self._progress = progress
        self.records = run.records
        self.slots = run.slots
        passes = [*dict.fromkeys(self.slots["pass"])]
        for pass_ in selection.passes:
            if pass_ not in passes:
                raise UnknownNameError(
                    f"there is no pass {shown(pass_)}{did_you_mean(pass_, passes) or '.'} "
                    f"This run has {', '.join(map(shown, passes)) or 'none'}."
                )
        nodes = selection.nodes
        if isinstance(nodes, str) and not nodes:  # metrics, notes and findings only
            self.slots = self.slots[:0]
        elif nodes is not None:
            chosen = [matches(nodes, node) for node in self.slots["node"]]
            self.slots = self.slots[np.array(chosen, bool)]
            if self.slots.empty:
                raise UnknownNameError(
                    f"no node is called {shown(nodes)}{did_you_mean(nodes, run.nodes) or '.'} "
                    f"This run has {len(run.nodes)} nodes, see `run.nodes`."
                )

    @cached_property
    def statistics(self) -> list[str]:
        """Names of the stored statistics, without derived ones."""
        return [name for name in self.run.statistics if name not in derived.NAMES]

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of the slots, ascending."""
        return self.slots.index.to_numpy(np.int64)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the whole run."""
        run = self.run
        return {
            "name": run.name,
            "group": run.group,
            "state": run.state,
            "started": run.started,
            "statistics": self.statistics,
            "aggregates": list(AGGREGATES),
            "sample_count": run.sample_count,
            "spec": run.spec.model_dump(mode="json"),
            "config": run.config,
            "facts": run.facts,
        }

    def chunks(self) -> Iterator[Chunk]:
        """Yield the records in chunks."""
        total, done = max(1, len(self.records)), 0
        for chunk in self.run.chunks():
            yield chunk
            done += len(chunk.records)
            self.report(done, total)

    def report(self, done: int, total: int) -> None:
        """Report how much of the export is done."""
        if self._progress is not None:
            self._progress("exporting", done, total)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the small tables by name."""
        slots = self.slots.reset_index()
        return {
            "records": self.records.reset_index(),
            "slots": slots,
            "kpis": self.run.kpis(),
            "notes": self.run.notes(),
            "findings": self.run.findings(),
        }

    def statistics_tables(self) -> Iterator[pd.DataFrame]:
        """Yield tables with one row per tensor and record, with all statistics and aggregates."""
        nonfinite = self.statistics.index("nonfinite")
        names = [
            name if how == AGGREGATES[0] else f"{name}.{how}"
            for name in self.statistics
            for how in AGGREGATES
        ]
        ids = self.ids
        for chunk in self.chunks():
            numbers = chunk.aggregates[:, ids]
            rows, columns = np.nonzero(~np.isnan(numbers[:, :, nonfinite, 0]))
            flat = numbers[rows, columns].reshape(len(rows), len(names))
            yield self._keyed(chunk, rows, columns, dict(zip(names, flat.T, strict=True)))

    def sample_tables(self) -> Iterator[pd.DataFrame]:
        """Yield tables with one row per recorded sample of each tensor and record."""
        if not self.run.sample_count:
            return
        nonfinite = self.statistics.index("nonfinite")
        shape = (0, self.run.sample_count, len(self.statistics))
        for chunk in self.chunks():
            found = [chunk.samples(int(number)) for number in self.ids]
            parts = [part for part in found if part is not None]
            numbers = np.stack(parts, axis=1) if parts else np.empty((len(chunk.records), *shape))
            rows, columns, samples = np.nonzero(~np.isnan(numbers[..., nonfinite]))
            flat = numbers[rows, columns, samples]
            named: dict[str, Any] = {"sample": samples.astype(np.int32)}
            named |= dict(zip(self.statistics, flat.T, strict=True))
            yield self._keyed(chunk, rows, columns, named)

    def _keyed(
        self,
        chunk: Chunk,
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        named: dict[str, NDArray[Any]],
    ) -> pd.DataFrame:
        """Return a table with columns that identify each row's record and slot."""
        steps = chunk.steps[rows]
        types = pd.Categorical(np.asarray(chunk.types, object)[rows], categories=self.run.types)
        keys: dict[str, Any] = {
            "record": chunk.records[rows],
            "step": steps,
            "type": types,
            "slot": self.ids[columns],
        }
        for key in KEYS:
            keys[key] = self._slot_column(key)[columns]
        return pd.DataFrame({**keys, **named})

    def _slot_column(self, key: str) -> Any:
        column = self.slots[key]
        if key == "iteration":
            return column.to_numpy(np.int32)
        return pd.Categorical(column, categories=list(dict.fromkeys(column)))
