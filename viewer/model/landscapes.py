"""Pictures that belong to the whole model: the curvature of a loss, and slices through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import ComgraError
from comgra_decl.query import Picture
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.runview import RunView

LANDSCAPES = ("hessian", "loss_slice")
"""Methods whose pictures belong to the whole model."""

Floats = NDArray[np.float64]

_WIDTH = 0.02
"""Standard deviation of each peak of a density, relative to the distance between the outermost
eigenvalues."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line to draw.

    Attributes:
        name: what it shows.
        x: the places, ascending.
        y: the values; not finite where something is missing.
        low: the lowest value of all steps.
        high: the highest value of all steps.
        marked: the place to mark; None for none.
        across: what the places are.
        value: what the values are.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: float
    high: float
    marked: float | None = None
    across: str = "coordinate"
    value: str = "value"


@dataclass(frozen=True, slots=True)
class Landscape:
    """A picture of the whole model at a step.

    Attributes:
        title: the name of the picture and its method.
        curves: lines to draw.
        grid: [points, points], losses on a grid; None if it is a line.
        low: the lowest value of the grid at all steps.
        high: the highest one.
        notes: further facts, one sentence each.
        way: for each step of the way of a training through the grid, (step, row, column), which are
            shares of the grid's height and width.
    """

    title: str
    curves: tuple[Curve, ...] = ()
    grid: Floats | None = field(default=None, compare=False)
    low: float = 0.0
    high: float = 0.0
    notes: tuple[str, ...] = ()
    way: tuple[tuple[int, float, float], ...] = ()


def landscape(view: RunView, name: str, type_: str, step: int) -> Landscape | None:
    """Return a recorded picture at a step; None if it was not made then."""
    try:
        found = view.now(("landscape", name, type_), lambda: view.run.picture(name))
        if step not in found.labels.get("step", ()):
            return None
        facts = view.ever(("landscape", name, step), lambda: view.run.picture(name, step).facts)
    except ComgraError:
        return None
    now = Picture(name, found.values, found.axes, found.node, step, found.labels, facts)
    if facts.get("method") == "hessian":
        return _curvature(now, step)
    return _slice(now, step)


def _curvature(found: Picture, step: int) -> Landscape:
    steps, ranks = found.labels["step"], found.labels["eigenvalue"]
    largest = found.values[:, 0]
    over = Curve(
        "largest eigenvalue by step", steps, largest.tolist(), *_ends(largest), step, "step"
    )
    facts, curves = found.facts, [over]
    if "nodes" in facts and "weights" in facts:
        at, values = density(facts["nodes"], facts["weights"])
        curves.append(
            Curve(
                "density of eigenvalues",
                at.tolist(),
                values.tolist(),
                0.0,
                float(values.max()),
                across="eigenvalue",
            )
        )
    row = found.values[steps.index(step)].tolist()
    ends = ", ".join(
        f"{rank}: {number(value, digits=4)}" for rank, value in zip(ranks, row, strict=True)
    )
    error = facts.get("trace_error")
    spread = "" if error is None else f" ± {number(error, digits=2)}"
    trace = f"trace {number(facts.get('trace', np.nan), digits=4)}{spread}"
    notes = [f"eigenvalues {ends}", f"{trace}, {count(facts.get('parameters', 0))} parameters"]
    residual = float(np.max(facts.get("residuals", 0.0)))
    if residual > 1e-3 * abs(row[0]):
        notes.append(f"accurate to {number(residual, digits=2)}; use more points")
    return Landscape(f"{found.name}: hessian", tuple(curves), notes=tuple(notes))


def density(nodes: Floats, weights: Floats, points: int = 200) -> tuple[Floats, Floats]:
    """Return (eigenvalues, density), both [points], with each peak widened to a Gaussian.

    The area under the density is 1 (Ghorbani et al. 2019, equation 4).

    Args:
        nodes: [vectors, peaks], estimated eigenvalues.
        weights: [vectors, peaks], the share of the eigenvalues near each one.
        points: the number of points.
    """
    low, high = float(nodes.min()), float(nodes.max())
    width = _WIDTH * (high - low) or 1e-3 * max(abs(high), 1e-9)
    at = np.linspace(low - 4 * width, high + 4 * width, points)
    peaks = np.exp(-0.5 * ((at[:, None, None] - nodes) / width) ** 2)
    values: Floats = (peaks * weights).sum(2).mean(1) / (width * np.sqrt(2 * np.pi))
    return at, values


def _slice(found: Picture, step: int) -> Landscape:
    values = found.values[found.labels["step"].index(step)]
    facts = found.facts
    coordinates = facts.get("coordinates", [])
    low, high = _ends(found.values)
    title = f"{found.name}: loss_slice"
    names = " and ".join(map(str, found.facts.get("directions", [])))
    notes = (f"directions: {names}", f"loss {number(found.facts.get('value', np.nan), digits=4)}")
    if values.ndim == 2:
        return Landscape(title, (), values, low, high, notes, _way(facts, coordinates))
    curve = Curve(
        "loss along the direction", coordinates, values.tolist(), low, high, 0.0, value="loss"
    )
    return Landscape(title, (curve,), notes=notes)


def _way(
    facts: dict[str, Any], coordinates: Sequence[float]
) -> tuple[tuple[int, float, float], ...]:
    way = facts.get("way")
    if way is None or len(coordinates) < 2:
        return ()
    points = len(coordinates)
    step_size = (coordinates[-1] - coordinates[0]) / (points - 1)
    places = (np.asarray(way["coordinates"]) - coordinates[0]) / step_size + 0.5  # cells' centres
    return tuple(
        (int(step), float(row) / points, float(column) / points)
        for step, (row, column) in zip(way["steps"], places.tolist(), strict=True)
    )


def _ends(values: Floats) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
