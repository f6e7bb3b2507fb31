"""The effects of the interventions on a probe, as tables of numbers to draw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.records import INTERVENTION_PREFIX
from comgra_decl.spec.interventions import INTO, NODE
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import nearest

_MOST_CELLS = 4096


@dataclass(frozen=True, slots=True)
class EffectTable:
    """The mean effects of an intervention at one step.

    Attributes:
        name: the intervention.
        step: the step.
        title: the name of the intervention, and what it is measured by.
        rows: the label of each row. nodes: its node; "" if it has none.
        columns: the label of each column.
        values: [rows, columns]; NaN where there is no such place.
        most: the largest magnitude at any step.
        note: what the numbers are, and of which step.
        missing: why there are no effects.
    """

    name: str
    step: int
    title: str
    rows: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    values: NDArray[np.float64] | None = None
    most: float = 0.0
    note: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class PlaceEffects:
    """What a change in one place does to each sample, and to their mean at all steps.

    Attributes:
        title: the intervention and the place.
        node: its node; "" if it has none.
        measure: what the effects are measured by.
        labels: the label of each sample; "" if it has none.
        without: the measure of each sample without the change.
        effects: the effect on each sample.
        steps: the steps with effects. means: the mean effect at each.
        step: the step of the samples.
    """

    title: str
    node: str
    measure: str
    labels: tuple[str, ...]
    without: NDArray[np.float64]
    effects: NDArray[np.float64]
    steps: NDArray[np.int64]
    means: NDArray[np.float64]
    step: int


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


def place_effects(view: RunView, table: EffectTable, row: int, column: int) -> PlaceEffects | None:
    """Return the effects in the place of a cell; None if there is no such place."""
    facts = view.run.intervention_facts(table.name, table.step)
    whole = view.run.effects(table.name)
    axes = [*facts["axes"]]
    try:
        if axes:
            grid = _grid(whole["mean"].loc[[table.step]], axes)
            rows, columns = _split(axes)
            key = dict(zip(rows, _tuple(grid.index[row]), strict=True))
            if columns:
                key |= dict(zip(columns, _tuple(grid.columns[column]), strict=True))
            place = whole.xs(tuple(key.values()), level=[*key])
        else:
            key, place = {}, whole
        here = place.loc[table.step]
    except (IndexError, KeyError):
        return None
    without = np.array(facts["baseline"], np.float64)
    labels = view.run.samples(table.step, type=INTERVENTION_PREFIX + table.name)["label"].tolist()
    known = labels[: len(without)] + [""] * (len(without) - len(labels))
    return PlaceEffects(
        ": ".join(filter(None, (table.name, _label([*key], tuple(key.values()))))),
        str(key.get(NODE, "")),
        str(facts["measure"]),
        tuple("" if label is None else str(label) for label in known),
        without,
        here[[*range(len(without))]].to_numpy(np.float64),
        place.index.to_numpy(np.int64),
        place["mean"].to_numpy(np.float64),
        table.step,
    )


def _table(view: RunView, name: str, step: int) -> EffectTable:
    facts = view.run.intervention_facts(name, step)
    title = f"{name}: effect on {facts.get('measure', 'the model')}"
    try:
        means = view.run.effects(name)["mean"]
    except ComgraError as error:
        return EffectTable(name, step, title, missing=str(error))
    here = means.loc[[step]]
    if len(here) > _MOST_CELLS:
        return EffectTable(name, step, title, missing=f"{len(here)} places are too many to show.")
    axes = [*facts["axes"]]
    grid = _grid(here, axes)
    rows, columns = _split(axes)
    labels = [_tuple(row) for row in grid.index]
    nodes = tuple(str(row[0]) if rows[:1] == [NODE] else "" for row in labels)
    names = tuple(_label(rows, row) for row in labels) if axes else (name,)
    heads = tuple(_label(columns, _tuple(each)) for each in grid.columns) if columns else ()
    finite = np.abs(means.to_numpy(np.float64))
    count = len(facts["clean"])
    return EffectTable(
        name,
        step,
        title,
        names,
        nodes,
        heads or ("effect",),
        grid.to_numpy(np.float64),
        float(finite[np.isfinite(finite)].max(initial=0.0)),
        f"means over {count} samples at step {step}; one scale for all steps",
    )


def _split(axes: list[str]) -> tuple[list[str], list[str]]:
    """Return the axes of rows and of columns: receivers, or else the last axis, are columns."""
    axes = sorted(axes, key=lambda axis: axis != NODE)  # the node first
    receiving = sorted((a for a in axes if a.startswith(INTO)), key=lambda axis: axis != INTO)
    sending = [axis for axis in axes if axis not in receiving]
    if receiving and sending:
        return sending, receiving
    return (axes[:-1], axes[-1:]) if len(axes) > 1 else (axes, [])


def _grid(here: pd.Series[float], axes: list[str]) -> pd.DataFrame:
    """Return the places of one step as a table, in their order."""
    rows, columns = _split(axes)
    if not columns:
        return here.droplevel("step").to_frame() if axes else here.to_frame()
    series = here.droplevel("step")
    order = [series.index.names.index(axis) for axis in (*rows, *columns)]
    grid = series.reorder_levels(order).unstack(columns, sort=False)
    assert isinstance(grid, pd.DataFrame)  # two levels at least
    return grid


def _tuple(label: object) -> tuple[object, ...]:
    return label if isinstance(label, tuple) else (label,)


def _label(axes: list[str], row: tuple[object, ...]) -> str:
    """Return the name of a place: modules alone, and parts with their names."""
    pairs = zip(axes, row, strict=False)
    return ", ".join(
        f"\u2192 {value}" if axis == INTO else str(value) if axis == NODE else _part(axis, value)
        for axis, value in pairs
    )


def _part(axis: str, value: object) -> str:
    return f"{axis.removeprefix(f'{INTO}.')} {value}"
