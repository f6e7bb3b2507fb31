"""Pictures of the units of a layer: dead ones, their top samples, and what they respond to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures import predictions, units
from comgra_decl.records import INTERVENTION_PREFIX, SAMPLE
from comgra_decl.spec.axes import unit_axis

from .picture import Picture
from .recorded_values import RecordedValues

_TOP = 8
"""Number of samples shown for each unit."""

_MOST_PAIRED = 4096
"""Most units whose correlations fit into one picture (128 MiB)."""


def dead_units(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return whether each unit is dead, by step; see `Run.picture`."""
    wanted = read.wanted("dead_units", node)
    steps = read.steps() if step is None else [step]
    values = read.over_steps(read.slot(wanted), steps, wanted)
    axis = _axis(read, wanted, [*values.values()][-1])
    dead = np.stack([units.dead_units(value, axis) for value in values.values()], 1)
    labels = {"step": [*values]}
    return Picture("dead_units", dead, ("unit", "step"), wanted, step, labels)


def top_samples(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the samples with the largest values of each unit; see `Run.picture`."""
    wanted, at = read.wanted("top_samples", node), read.step(step, read.type)
    value = read.value(wanted, at)
    active = units.activations(value, _axis(read, wanted, value))
    order = np.argsort(-active, 0, kind="stable")[:_TOP].T
    values = np.stack([order.astype(np.float64), np.take_along_axis(active.T, order, 1)], 2)
    labels = {"quantity": [SAMPLE, "value"]}
    axes = ("unit", "rank", "quantity")
    return Picture("top_samples", values, axes, wanted, at, labels, {"samples": len(value)})


def unit_effects(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the units ranked by how much they differ between categories; see `Run.picture`."""
    wanted, at = read.wanted("unit_effects", node), read.step(step, read.type)
    value, groups, names = read.grouped(wanted, at)
    active = units.activations(value, _axis(read, wanted, value))
    return _ranked("unit_effects", active, groups, names, wanted, at)


def unit_effects_of_types(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the units ranked by how much they differ between types; see `Run.picture`."""
    wanted, at = read.wanted("unit_effects_of_types", node), read.step(step, read.type)
    slot, found = read.run.slot(wanted, role=read.slot(wanted).key.role), {}
    for type_ in read.run.types:
        earlier = [s for s in read.steps_of(type_) if s <= at]
        if earlier and not type_.startswith(INTERVENTION_PREFIX):
            try:
                value = slot.value(earlier[-1], type=type_)
            except UnknownNameError:
                continue
            found[type_] = units.activations(value, _axis(read, wanted, value))
    groups = np.repeat(np.arange(len(found)), [len(active) for active in found.values()])
    active = np.concatenate([*found.values()]) if found else np.zeros((0, 0))
    return _ranked("unit_effects_of_types", active, groups, [*found], wanted, at)


def _ranked(
    name: str, active: NDArray[Any], groups: NDArray[np.int64], names: list[str], node: str, at: int
) -> Picture:
    held_out = predictions.every_other(groups)
    halves = [groups[half] for half in (~held_out, held_out)]
    if any(len(half) < 3 or len({*half.tolist()}) < 2 for half in halves):
        what = "types of execution" if name == "unit_effects_of_types" else "categories"
        raise UnknownNameError(
            f"the picture {name!r} compares {what}, and measures again with half of the samples, "
            f"so it needs at least six samples, and two of each of two {what}; at step {at}, "
            f"{node!r} has {len(groups)} samples of {len(names)}. Raise `samples.count`, or set "
            "`samples.by` to have the same number of each category."
        )
    order, group, effect = units.effects(active, groups, held_out=held_out)
    values = np.concatenate([np.stack([order, group], 1), effect], 1)
    labels = {"quantity": ["unit", "category", "effect", "held-out effect"], "category": names}
    facts = {"fitted": int((~held_out).sum()), "tested": int(held_out.sum())}
    return Picture(name, values, ("rank", "quantity"), node, at, labels, facts)


def coactivation(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return the correlation of all pairs of units; see `Run.picture`."""
    wanted, at = read.wanted("coactivation", node), read.step(step, read.type)
    value = read.value(wanted, at)
    axis = _axis(read, wanted, value)
    size = value.shape[axis]
    if size > _MOST_PAIRED:
        raise UnknownNameError(
            f"{wanted!r} has {size} units; their correlations are too many for one picture, of at "
            f"most {_MOST_PAIRED} units. Compute those of some from `run.value`."
        )
    facts = {"samples": len(value), "positions": value[0].size // size if len(value) else 0}
    found = units.coactivation(value, axis)
    return Picture("coactivation", found, ("unit", "other unit"), wanted, at, {}, facts)


def _axis(read: RecordedValues, node: str, value: NDArray[Any]) -> int:
    """Return the axis of a node's value [samples, ...] whose entries are its units."""
    if value.ndim < 2 or not value.size:
        raise UnknownNameError(f"{node!r} has the shape {value.shape}, so it has no units.")
    names = read.axes(read.slot(node), value.shape[1:])
    return 1 + unit_axis(names)
