"""Everything in a run that has a value at each training record, as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo
from comgra_decl.rules.base import Rule, SlotRule
from comgra_decl.rules.correlations.correlation import Side
from comgra_decl.rules.diagnosis import examined
from comgra_decl.rules.engine import Engine
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Floats, Window

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run
    from comgra_decl.spec.rules import Rules

MOST_VALUES = 30_000_000
"""How many numbers to hold in memory."""

LEAST = 0.8
"""The least share of records that must have a series."""


@dataclass
class Series:
    """Columns over the `n` training records.

    Attributes:
        steps: of the records, int64 [n].
        sides: what each column of `values` is.
        values: statistics of slots, float32 [n, m]; NaN where missing.
        numbers: losses and other metrics by name, float32 [n] each.
        marks: at which records something holds, bool [n] each: a rule fires, a type, a tag.
    """

    steps: NDArray[np.int64]
    sides: list[Side] = field(default_factory=list)
    values: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    numbers: dict[str, Floats] = field(default_factory=dict)
    marks: dict[Side, NDArray[np.bool_]] = field(default_factory=dict)


def series_of(
    run: Run, rules: Rules | None = None, *, trust: bool = False
) -> tuple[Series, Engine]:
    """Returns all series of a run, and its rules, which have seen all of it.

    Of a run with more than `MOST_VALUES` numbers, the series cover evenly spaced records.
    """
    hits: dict[str, list[NDArray[np.bool_]]] = {}
    size = len(run.slots) * len(run.statistics) * len(run.steps)
    reader = _Reader(max(1, -(-size // MOST_VALUES)))

    def prepare(watched: list[Rule]) -> None:
        watched.insert(0, reader)
        for rule in watched:
            if isinstance(rule, SlotRule):
                _watch(rule, hits.setdefault(rule.name, []))

    engine = examined(run, rules, trust=trust, prepare=prepare)
    found = Series(np.concatenate(reader.steps) if reader.steps else np.zeros(0, np.int64))
    if len(found.steps):
        table, names = engine.scene.table, engine.scene.statistics
        found.sides, found.values = _columns(table, names, _joined(reader.windows, len(table)))
        found.numbers = _numbers(run.kpis(), found.steps)
        fired = {name: _every(parts, reader) for name, parts in hits.items() if parts}
        found.marks = _fired(fired, len(found.steps)) | _labels(run, found.steps)
    return found, engine


def _every(parts: list[NDArray[np.bool_]], reader: _Reader) -> NDArray[np.bool_]:
    """Returns a rule's column for the records that were kept; empty if the rule did not see all."""
    column = np.concatenate(parts)
    return column[:: reader.every] if len(column) == reader.seen else column[:0]


class _Reader(Rule):
    """Keeps the statistics of every n-th training record; finds nothing."""

    name = "_together"

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.seen = every, 0
        self.windows: list[Floats] = []
        self.steps: list[NDArray[np.int64]] = []

    def look(self, window: Window) -> None:
        rows = slice(-self.seen % self.every, None, self.every)
        self.seen += len(window)
        self.windows.append(np.array(window.aggregates[rows, ..., 0]))
        self.steps.append(window.steps[rows])

    def findings(self, scene: Any) -> list[Any]:
        return []

    def missing(self, scene: Any) -> str | None:
        return None


def _watch(rule: SlotRule, hits: list[NDArray[np.bool_]]) -> None:
    """Makes a rule note at which records its condition holds, whatever its patience."""
    measure: Callable[..., Any] = rule.measure

    def watched(window: Window, at: Any) -> Any:
        hit, evidence = measure(window, at)
        fired = np.asarray(hit, bool) & window.present[:, at]
        hits.append(np.asarray(fired.any(axis=1), bool))
        return hit, evidence

    rule.measure = watched  # type: ignore[method-assign]


def _joined(windows: list[Floats], slots: int) -> Floats:
    """Returns [records, slots, statistics]; earlier windows know fewer slots."""
    wide = [
        np.pad(w, ((0, 0), (0, slots - w.shape[1]), (0, 0)), constant_values=np.nan)
        for w in windows
    ]
    return np.concatenate(wide)


def is_loss(info: SlotInfo) -> bool:
    """Whether a tensor is a loss, which correlates with the loss by definition."""
    return info.kind == "loss" or info.module_class.endswith("Loss")


def _columns(table: SlotTable, names: tuple[str, ...], cube: Floats) -> tuple[list[Side], Floats]:
    """Returns the series that most records have and that change."""
    wanted = table.floating & ~table.where(lambda i: i.kind == "target" or is_loss(i))
    flat = cube.reshape(len(cube), -1)
    there = np.isfinite(flat)
    with np.errstate(all="ignore"):
        low = np.where(there, flat, np.inf).min(axis=0)
        high = np.where(there, flat, -np.inf).max(axis=0)
    good = (there.mean(axis=0) >= LEAST) & (high > low) & np.repeat(wanted, len(names))
    chosen = np.flatnonzero(good)
    sides = []
    for column in chosen.tolist():
        slot, statistic = divmod(column, len(names))
        place = table.place(slot)
        sides.append(Side(f"{names[statistic]} of {place}", place, names[statistic]))
    return sides, flat[:, chosen]


def _numbers(table: pd.DataFrame, steps: NDArray[np.int64]) -> dict[str, Floats]:
    found: dict[str, Floats] = {}
    types = dict(table.groupby("name", sort=False)["type"].nunique().items())
    for (name, type_), part in table.groupby(["name", "type"], sort=False):
        known = part.drop_duplicates("step", keep="last").set_index("step")["value"]
        column = known.reindex(steps).to_numpy(np.float32)
        label = str(name) if types[name] == 1 else f"{name} ({type_})"
        if np.isfinite(column).mean() >= LEAST and np.nanmax(column) > np.nanmin(column):
            found[label] = column
    return found


def _fired(columns: dict[str, NDArray[np.bool_]], records: int) -> dict[Side, NDArray[np.bool_]]:
    """Returns when each rule fired; leaves out rules that did not see every record."""
    return {
        Side(f"rule {name}"): column
        for name, column in columns.items()
        if len(column) == records and 0 < column.sum() < records
    }


def _labels(run: Run, steps: NDArray[np.int64]) -> dict[Side, NDArray[np.bool_]]:
    """Returns which records have each type and tag, if there are several."""
    records = run.records
    records = records[(records["mode"] == "train") & records["step"].isin(steps)]
    if len(records) != len(steps):
        return {}
    found = {Side(f"type {t}"): (records["type"] == t).to_numpy() for t in run.types}
    for tag in run.tags:
        found.setdefault(
            Side(f"tag {tag}"), np.array([tag in (tags or ()) for tags in records["tags"]], bool)
        )
    return {side: column for side, column in found.items() if 0 < column.sum() < len(steps)}
