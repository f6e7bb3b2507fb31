"""Quantities with a value at each training record of a run, as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.base import Rule, SlotRule
from comgra_decl.rules.correlations.correlation import Side
from comgra_decl.rules.correlations.origin import Origin, Origins
from comgra_decl.rules.diagnosis import examined
from comgra_decl.rules.engine import Engine
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Floats, Window

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run
    from comgra_decl.spec.rules import Rules

MOST_VALUES = 30_000_000
"""Maximum number of values in memory."""

MODES = ("train", "eval")
"""The types of untagged steps."""

LEAST = 0.8
"""Minimum share of records in which a series must have a value."""


@dataclass
class Series:
    """Columns of values at the `n` training records.

    Attributes:
        steps: of the records, int64 [n].
        sides: the side that each column of `values` describes.
        values: statistics of slots, float32 [n, m]; NaN where missing.
        numbers: losses and other metrics by name, float32 [n] each.
        marks: the records with a firing rule, a type or a tag, bool [n] each.
        origins: the origin of each column of `values`; empty if unknown.
    """

    steps: NDArray[np.int64]
    sides: list[Side] = field(default_factory=list)
    values: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    numbers: dict[str, Floats] = field(default_factory=dict)
    marks: dict[Side, NDArray[np.bool_]] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)

    def origin(self, column: int) -> Origin:
        """Return the origin of a column of `values`."""
        return self.origins[column] if self.origins else Origin.FORWARD

    @property
    def groups(self) -> dict[Side, NDArray[np.bool_]]:
        """Marks set by the program: types of execution and tags."""
        return {side: mark for side, mark in self.marks.items() if is_group(side)}


def is_group(side: Side) -> bool:
    """Return whether a mark is a type of execution or a tag."""
    return side.text.startswith(("type ", "tag "))


def series_of(
    run: Run, rules: Rules | None = None, *, trust: bool = False
) -> tuple[Series, Engine]:
    """Return all series of a run, and its rules, which have checked the whole run.

    If a run has more than `MOST_VALUES` numbers, the series cover only evenly spaced records.
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
        cube = _joined(reader.windows, len(table))
        found.sides, found.values, found.origins = _columns(
            table, names, cube=cube, origins=Origins(engine.scene)
        )
        found.numbers = _numbers(run, found.steps)
        fired = {name: _every(parts, reader) for name, parts in hits.items() if parts}
        found.marks = _fired(fired, len(found.steps)) | _labels(run, found.steps)
    return found, engine


def _every(parts: list[NDArray[np.bool_]], reader: _Reader) -> NDArray[np.bool_]:
    """Return a rule's column for the selected records; empty if the rule skipped any record."""
    column = np.concatenate(parts)
    return column[:: reader.every] if len(column) == reader.seen else column[:0]


class _Reader(Rule):
    """A rule without findings that collects the statistics of every n-th training record."""

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
    """Make a rule store the records at which its condition holds, regardless of its patience."""
    measure: Callable[..., Any] = rule.measure

    def watched(window: Window, at: Any) -> Any:
        hit, evidence = measure(window, at)
        fired = np.asarray(hit, bool) & window.present[:, at]
        hits.append(np.asarray(fired.any(axis=1), bool))
        return hit, evidence

    rule.measure = watched  # type: ignore[method-assign]


def _joined(windows: list[Floats], slots: int) -> Floats:
    """Return the joined windows [records, slots, statistics]; earlier ones have fewer slots."""
    wide = [
        np.pad(w, ((0, 0), (0, slots - w.shape[1]), (0, 0)), constant_values=np.nan)
        for w in windows
    ]
    return np.concatenate(wide)


def _columns(
    table: SlotTable, names: tuple[str, ...], *, cube: Floats, origins: Origins
) -> tuple[list[Side], Floats, list[Origin]]:
    """Return the series that vary and exist in most records; omits those of the loss."""
    wanted = table.floating & ~table.where(lambda i: origins.belongs_to_loss(i.key))
    flat = cube.reshape(len(cube), -1)
    there = np.isfinite(flat)
    with np.errstate(all="ignore"):
        low = np.where(there, flat, np.inf).min(axis=0)
        high = np.where(there, flat, -np.inf).max(axis=0)
    good = (there.mean(axis=0) >= LEAST) & (high > low) & np.repeat(wanted, len(names))
    chosen = np.flatnonzero(good)
    sides, known = [], []
    for column in chosen.tolist():
        slot, statistic = divmod(column, len(names))
        place = table.place(slot)
        sides.append(Side(f"{names[statistic]} of {place}", place, names[statistic]))
        known.append(origins.of(table.infos[slot]))
    return sides, flat[:, chosen], known


def _numbers(run: Run, steps: NDArray[np.int64]) -> dict[str, Floats]:
    """Return each metric at the records, with one column for all types of training records.

    With separate columns, a loss could not be compared between types, or with and without a tag.
    """
    records = run.records
    trained = set(records["type"][records["mode"] == "train"])
    table = run.kpis()
    table = table.assign(label=_labelled(table, trained))
    found: dict[str, Floats] = {}
    for label, part in table.groupby("label", sort=False):
        known = part.drop_duplicates("step", keep="last").set_index("step")["value"]
        column = known.reindex(steps).to_numpy(np.float32)
        if np.isfinite(column).mean() >= LEAST and np.nanmax(column) > np.nanmin(column):
            found[str(label)] = column
    return found


def _labelled(table: pd.DataFrame, trained: set[str]) -> list[str]:
    """Return the series of each value: its metric, and its type unless that is a training type."""
    pairs = list(zip(table["name"], table["type"], strict=True))
    alone = {name for name, group in table.groupby("name") if group["type"].nunique() == 1}
    return [
        str(name) if type_ in trained or name in alone else f"{name} ({type_})"
        for name, type_ in pairs
    ]


def _fired(columns: dict[str, NDArray[np.bool_]], records: int) -> dict[Side, NDArray[np.bool_]]:
    """Return the records that each rule reports; omits rules that did not check every record."""
    return {
        Side(f"rule {name}"): column
        for name, column in columns.items()
        if len(column) == records and 0 < column.sum() < records
    }


def _labels(run: Run, steps: NDArray[np.int64]) -> dict[Side, NDArray[np.bool_]]:
    """Return which records have each type and tag, if there are several.

    The first tag of a step is its type, unless the spec defines the types.
    """
    records = run.records
    records = records[(records["mode"] == "train") & records["step"].isin(steps)]
    if len(records) != len(steps):
        return {}
    tagged = run.spec.types.by is None
    found = {
        Side(f"{'tag' if tagged and t not in MODES else 'type'} {t}"): (
            records["type"] == t
        ).to_numpy()
        for t in run.types
    }
    for tag in run.tags:
        found.setdefault(
            Side(f"tag {tag}"), np.array([tag in (tags or ()) for tags in records["tags"]], bool)
        )
    return {side: column for side, column in found.items() if 0 < column.sum() < len(steps)}
