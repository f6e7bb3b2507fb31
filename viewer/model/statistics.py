"""Table of all statistics of the selected tensor, and its recorded samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from comgra_decl.records import STATISTICS
from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.runview import Rows, RunView, Slot
from comgra_decl.viewer.model.selection import Selection, previous, slots_of

UPDATE = "update"
"""The pass that contains the optimizer's change to a parameter."""

_NAN = math.nan
Numbers = dict[str, float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One number in a table. `recorded` distinguishes a NaN value from a missing value."""

    value: float = _NAN
    before: float = _NAN
    recorded: bool = False

    @property
    def broken(self) -> bool:
        """Whether a recorded value is NaN or infinite."""
        return self.recorded and not math.isfinite(self.value)

    @property
    def change(self) -> float:
        """Difference from the previous record; NaN if there is none."""
        return self.value - self.before


@dataclass(frozen=True, slots=True)
class StatisticsTable:
    """A table with statistics as rows and passes as columns. `before` is the step to compare with.

    The columns are the forward pass, the selected gradient, and the update to a parameter.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    before: int | None


@dataclass(frozen=True, slots=True)
class SampleTable:
    """One statistic per recorded sample: rows `(sample, cells)`, one cell per pass.

    `batch_index` is each sample's index in the batch, and `labels` is its category, if any.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]
    batch_index: tuple[int, ...] = ()
    missing: str = ""
    labels: tuple[str, ...] = ()


def statistics_table(view: RunView, at: Selection) -> StatisticsTable:
    """Return every statistic of the selected tensor at the selected step, for all passes."""
    slots: tuple[Slot | None, ...] = slots_of(view, at)
    columns: tuple[str, ...] = ("forward", pass_label(at.gradient))
    update = view.passes(at.node, at.role, at.iteration).get(UPDATE)
    if update is not None and at.gradient != UPDATE:
        slots, columns = (*slots, update), (*columns, UPDATE)
    if at.step is None:
        return StatisticsTable(columns, (), None)
    before = previous(view.steps(at.type), at.step)
    now = [_numbers(view, slot, at.step, at) for slot in slots]
    old = [_numbers(view, slot, before, at) for slot in slots]
    rows = tuple(
        (name, tuple(_cell(name, new, past) for new, past in zip(now, old, strict=True)))
        for name in view.run.statistics
    )
    return StatisticsTable(columns, rows, before)


def sample_table(view: RunView, at: Selection) -> SampleTable:
    """Return the selected statistic of each recorded sample at the selected step."""
    pair = slots_of(view, at)
    columns = ("forward", pass_label(at.gradient))
    batched = [slot for slot in pair if slot is not None and slot.batch_dim is not None]
    if not batched or at.step is None:
        reason = "This tensor has no batch dimension." if any(pair) else ""
        return SampleTable(columns, (), missing=reason)
    step = at.step
    tables = [view.sample_row(s, step, at.type) if s in batched else None for s in pair]
    known = [table for table in tables if table is not None]
    numbers = sorted({i for table in known for i in table.lines()})
    rows = tuple((i, tuple(_sample_cell(t, i, at.statistic) for t in tables)) for i in numbers)
    missing = "" if rows else "No samples were recorded at this step."
    places, labels = tuple(known[0].batch_index), tuple(known[0].labels)
    return SampleTable(columns, rows, places, missing, labels)


def _numbers(view: RunView, slot: Slot | None, step: int | None, at: Selection) -> Numbers:
    """Return the statistics of a slot at a step; empty if there is no record."""
    if slot is None or step is None:
        return {}
    if at.sample is not None and slot.batch_dim is not None:
        frame, key = view.sample_row(slot, step, at.type), at.sample
    else:
        frame, key = view.row(step, at.type, at.over), slot.id
    return frame.line(key)


def _cell(name: str, new: Numbers, past: Numbers) -> Cell:
    return Cell(
        float(new.get(name, _NAN)), float(past.get(name, _NAN)), recorded=is_recorded(name, new)
    )


def _sample_cell(rows: Rows | None, sample: int, statistic: str) -> Cell:
    line = rows.line(sample) if rows is not None else {}
    return Cell(float(line.get(statistic, _NAN)), recorded=is_recorded(statistic, line))


def is_recorded(name: str, line: Numbers) -> bool:
    """Return whether a value was recorded, even NaN.

    Some statistics apply to only a few tensors.
    """
    broken = line.get("nonfinite", _NAN)
    applies = name in STATISTICS or not math.isnan(line.get(name, _NAN)) or broken > 0
    return applies and not math.isnan(broken)
