"""The declaration as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator

from comgra_decl.records import STATISTICS
from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.keep import KeepSpec
from comgra_decl.spec.nodes import NodeSpec, Selectors
from comgra_decl.spec.run import HistogramSpec, RunSpec, SamplesSpec, StoreSpec, ValuesSpec
from comgra_decl.spec.schedule import ScheduleSpec

StatisticName = Literal[
    "mean", "abs_mean", "std", "min", "max", "abs_max", "l2", "zero_fraction", "nonfinite"
]
"""Every statistic that can be recorded; `records.STATISTICS` as a type."""


def _in_stored_order(names: list[StatisticName]) -> list[StatisticName]:
    wanted = {*names, "nonfinite"}
    return [name for name in _ALL_STATISTICS if name in wanted]


def _without_switched_off(entries: Any) -> Any:
    """An entry set to null is one that the user has taken out of a preset."""
    if not isinstance(entries, Mapping):
        return entries
    return {name: entry for name, entry in entries.items() if entry is not None}


_ALL_STATISTICS: list[StatisticName] = list(get_args(StatisticName))
assert tuple(_ALL_STATISTICS) == STATISTICS, "the spec and the records name other statistics"


class Spec(SpecModel):
    """What to capture, when, and how it is reduced; saved with the run."""

    run: RunSpec = RunSpec()
    """Where the run is stored."""

    nodes: Annotated[dict[str, NodeSpec], BeforeValidator(_without_switched_off)] = {}
    """What to capture, by a name of your choice; later entries refine earlier ones."""

    exclude: Selectors = []
    """What is left out of every entry: globs over module paths or mappings, as in `select`."""

    stats: Annotated[list[StatisticName], AfterValidator(_in_stored_order)] = _ALL_STATISTICS
    """Statistics over the value dims of each sample; `nonfinite` is always among them."""

    histogram: HistogramSpec | None = HistogramSpec()
    """Histograms of all recorded tensors; null for none."""

    samples: SamplesSpec = SamplesSpec()
    """Elements of the batch that are recorded one by one."""

    values: ValuesSpec = ValuesSpec()
    """Limits of the tensors that are kept as they are."""

    schedule: ScheduleSpec = ScheduleSpec()
    """Which steps are recorded."""

    keep: KeepSpec | None = None
    """Steps that are kept because of what happened in them; null for none."""

    annotations: Bool = True
    """Whether what the program names with `comgra.node(...)` is recorded without being selected:
    its output and gradient. Entries with `select: {annotation: ...}` say it for each name."""

    graph: Bool = True
    """Whether the dependency graph of the recorded tensors is followed."""

    store: StoreSpec = StoreSpec()
    """How records travel to the disk."""

    enabled: Bool = True
    """Whether anything is recorded at all."""
