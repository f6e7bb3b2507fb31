"""The effects of the interventions on a probe, as tables of numbers to draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.records import INTERVENTION_PREFIX
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import nearest

_MOST_CELLS = 4096
_NODE = "node"


@dataclass(frozen=True, slots=True)
class EffectTable:
    """The mean effects of an intervention at one step.

    Attributes:
        title: the name of the intervention, and what it is measured by.
        rows: the label of each row. nodes: its node; "" if it has none.
        columns: the label of each column.
        values: [rows, columns]; NaN where there is no such place.
        most: the largest magnitude at any step.
        note: what the numbers are, and of which step.
        missing: why there are no effects.
    """

    title: str
    rows: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    values: NDArray[np.float64] | None = None
    most: float = 0.0
    note: str = ""
    missing: str = ""


def effect_tables(view: RunView, probe: str, step: int) -> tuple[EffectTable, ...]:
    """Return a table for each intervention on a probe, at its record nearest to a step."""
    declared = view.run.spec.interventions
    found = []
    for name in view.run.interventions:
        steps = view.steps(INTERVENTION_PREFIX + name)
        at = nearest(steps, step)
        if name in declared and declared[name].of == probe and at is not None:
            found.append(view.now(("effects", name, at), lambda n=name, s=at: _table(view, n, s)))  # type: ignore[misc]
    return tuple(found)


def _table(view: RunView, name: str, step: int) -> EffectTable:
    facts = view.run.intervention_facts(name, step)
    title = f"{name}: effect on {facts.get('measure', 'the model')}"
    try:
        means = view.run.effects(name)["mean"]
    except ComgraError as error:
        return EffectTable(title, missing=str(error))
    here = means.loc[[step]]
    if len(here) > _MOST_CELLS:
        return EffectTable(title, missing=f"{len(here)} places are too many to show.")
    axes = [*facts["axes"]]
    axes.sort(key=lambda axis: axis != _NODE)  # the node first
    grid = _grid(here, axes)
    labels = [row if isinstance(row, tuple) else (row,) for row in grid.index]
    nodes = tuple(str(row[0]) if axes[:1] == [_NODE] else "" for row in labels)
    names = tuple(_label(axes, row) for row in labels) if axes else (name,)
    last = axes[-1] if len(axes) > 1 else ""
    columns = tuple(f"{last} {column}".strip() for column in grid.columns) if last else ("effect",)
    finite = np.abs(means.to_numpy(np.float64))
    count = len(facts["clean"])
    return EffectTable(
        title,
        names,
        nodes,
        columns,
        grid.to_numpy(np.float64),
        float(finite[np.isfinite(finite)].max(initial=0.0)),
        f"means over {count} samples at step {step}; one scale for all steps",
    )


def _grid(here: pd.Series[float], axes: list[str]) -> pd.DataFrame:
    """Return the last axis as columns and all others as rows, in their order."""
    if len(axes) < 2:
        return here.droplevel("step").to_frame() if axes else here.to_frame()
    series = here.droplevel("step")
    order = [series.index.names.index(axis) for axis in axes]
    grid = series.reorder_levels(order).unstack(axes[-1], sort=False)
    assert isinstance(grid, pd.DataFrame)  # two levels at least
    return grid


def _label(axes: list[str], row: tuple[object, ...]) -> str:
    pairs = zip(axes, row, strict=False)
    return ", ".join(str(value) if axis == _NODE else f"{axis} {value}" for axis, value in pairs)
