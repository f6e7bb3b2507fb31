"""The effects of the interventions on a probe, as tables of numbers to draw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query.effects import ERROR, MEAN
from comgra_decl.records import INTERVENTION_PREFIX, PROBE_PREFIX
from comgra_decl.spec.interventions import INTO, NODE, InterventionSpec
from comgra_decl.viewer.model.images import largest_magnitude
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import nearest

_MOST_CELLS = 100_000
ALL_SAMPLES = "all samples"
"""The label of a number that belongs to all samples together."""

_OF_SWEEPS = {"sweep", "estimate", "batch", "every"}


@dataclass(frozen=True, slots=True)
class EffectTable:
    """The mean effects of an intervention at one step.

    Attributes:
        name: the intervention.
        step: the step.
        probe: its probe.
        swept: whether there is an effect for each place, instead of a record of all tensors.
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
    probe: str
    swept: bool
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
        labels: the label of each sample; "" if it has none, and `ALL_SAMPLES` if what is measured,
            such as the gradient of a parameter, belongs to all of them.
        without: the measure of each sample without the change.
        effects: the effect on each sample.
        steps: the steps with effects. means: the mean effect at each. errors: its standard error.
        step: the step of the samples.
        entry: a spec of an intervention that records all tensors with this change; "" if the
            intervention does so itself.
    """

    title: str
    node: str
    measure: str
    labels: tuple[str, ...]
    without: NDArray[np.float64]
    effects: NDArray[np.float64]
    steps: NDArray[np.int64]
    means: NDArray[np.float64]
    errors: NDArray[np.float64]
    step: int
    entry: str


def probe_type_of(view: RunView, type_: str) -> str:
    """Return the type of execution of an intervention's probe, and any other type unchanged."""
    declared = view.spec.interventions.get(type_.removeprefix(INTERVENTION_PREFIX))
    if declared is None or not type_.startswith(INTERVENTION_PREFIX):
        return type_
    return PROBE_PREFIX + declared.of


def effect_tables(view: RunView, probe: str, step: int) -> tuple[EffectTable, ...]:
    """Return a table for each intervention on a probe, at its record nearest to a step."""
    declared = view.spec.interventions
    found = []
    for name in view.run.interventions:
        steps = view.steps(INTERVENTION_PREFIX + name)
        at = nearest(steps, step)
        if name in declared and declared[name].of == probe and at is not None:
            found.append(view.now(("effects", name, at), lambda n=name, s=at: _table(view, n, s)))  # type: ignore[misc]
    return tuple(found)


def unmade(view: RunView, probe: str) -> tuple[tuple[str, str], ...]:
    """Return the declared interventions on a probe that have no record, and why."""
    made, warnings = view.run.interventions, (view.run.report or {}).get("warnings", ())
    found = []
    for name, spec in view.spec.interventions.items():
        if spec.of != probe or name in made:
            continue
        reasons = [str(each) for each in warnings if f"intervention {name!r}" in str(each)]
        found.append((name, "; ".join(reasons) or "The run has no record of it yet."))
    return tuple(found)


def place_effects(view: RunView, table: EffectTable, row: int, column: int) -> PlaceEffects | None:
    """Return the effects in the place of a cell; None if there is no such place."""
    facts = view.run.intervention_facts(table.name, table.step)
    axes = [*facts["axes"]]
    rows, columns = _split(axes)
    key: dict[str, object] = {}
    try:
        if axes:
            grid = _grid(_effects(view, table.name, table.step)["mean"], axes)
            key = dict(zip(rows, _tuple(grid.index[row]), strict=True))
            if columns:
                key |= dict(zip(columns, _tuple(grid.columns[column]), strict=True))
    except IndexError:
        return None
    place = tuple(key[axis] for axis in axes)

    def effects(at: int) -> pd.Series[float]:
        found = _effects(view, table.name, at)
        return found.loc[[(at, *place) if place else at]].iloc[0]

    course: dict[int, tuple[float, float]] = {}
    for at in view.steps(INTERVENTION_PREFIX + table.name).tolist():
        try:
            mean, error = effects(at)[[MEAN, ERROR]].tolist()
            course[at] = mean, error
        except (ComgraError, KeyError):  # not measured, or another number of positions
            course[at] = np.nan, np.nan
    try:
        here = effects(table.step)
    except KeyError:
        return None
    without = np.array(facts["baseline"], np.float64)
    labels = view.run.samples(table.step, type=INTERVENTION_PREFIX + table.name)["label"].tolist()
    known = labels[: len(without)] + [""] * (len(without) - len(labels))
    if len(without) == 1 < len(labels):
        known = [ALL_SAMPLES]
    return PlaceEffects(
        ": ".join(filter(None, (table.name, _label([*key], tuple(key.values()))))),
        str(key.get(NODE, "")),
        str(facts["measure"]),
        tuple("" if label is None else str(label) for label in known),
        without,
        np.asarray(here[[*range(len(without))]], np.float64),
        np.array([*course], np.int64),
        np.array([mean for mean, _ in course.values()], np.float64),
        np.array([error for _, error in course.values()], np.float64),
        table.step,
        _entry(view.spec.interventions[table.name], key) if axes else "",
    )


def _entry(spec: InterventionSpec, key: Mapping[str, object]) -> str:
    """Return a spec, in JSON, of the change in one place without a sweep."""
    found = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_OF_SWEEPS)
    receivers = found.get(INTO)
    for axis, value in key.items():
        if axis == NODE:
            found["select"] = value
            found.pop("exclude", None)
        elif axis == INTO:
            assert isinstance(receivers, dict)
            receivers["select"] = value
            receivers.pop("exclude", None)
        else:
            owner = found if not axis.startswith(INTO) else receivers
            assert isinstance(owner, dict)
            name = axis.removeprefix(f"{INTO}.")
            parts = owner.setdefault("parts", {})
            parts[name] = {**parts.get(name, {}), "only": [value]}
    return json.dumps(found, ensure_ascii=False, default=int)


def _effects(view: RunView, name: str, step: int) -> pd.DataFrame:
    """Return the effects at one step, which never change."""
    return view.ever(("effects", name, step), lambda: view.run.effects(name, step))


def _most(view: RunView, name: str) -> float:
    """Return the largest magnitude of the mean effects at all steps."""

    def largest(step: int) -> float:
        try:
            return largest_magnitude(_effects(view, name, step)["mean"].to_numpy(np.float64))
        except ComgraError:
            return 0.0

    steps = view.steps(INTERVENTION_PREFIX + name).tolist()
    bounds = [view.ever(("largest", name, s), lambda s=s: largest(s)) for s in steps]  # type: ignore[misc]
    return max(bounds, default=0.0)


def _table(view: RunView, name: str, step: int) -> EffectTable:
    facts = view.run.intervention_facts(name, step)
    axes = [*facts["axes"]]
    table = EffectTable(
        name,
        step,
        view.spec.interventions[name].of,
        bool(axes),
        f"{name}: effect on {facts.get('measure', 'the model')}",
    )
    try:
        here = _effects(view, name, step)["mean"]
    except ComgraError as error:
        return replace(table, missing=str(error))
    if len(here) > _MOST_CELLS:
        return replace(table, missing=f"{len(here)} places are too many to show.")
    grid = _grid(here, axes)
    rows, columns = _split(axes)
    labels = [_tuple(row) for row in grid.index]
    heads = tuple(_label(columns, _tuple(each)) for each in grid.columns) if columns else ()
    return replace(
        table,
        rows=tuple(_label(rows, row) for row in labels) if axes else (name,),
        nodes=tuple(str(row[0]) if rows[:1] == [NODE] else "" for row in labels),
        columns=heads or ("effect",),
        values=grid.to_numpy(np.float64),
        most=_most(view, name),
        note=f"{_whose(len(facts['clean']))} at step {step}; one scale for all steps",
    )


def _whose(count: int) -> str:
    return f"means over {count} samples" if count > 1 else "one number for all samples"


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
