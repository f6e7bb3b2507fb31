"""The dependency graph of a run at a step: nodes, edges, and the colours that paint them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.graph.layout import GraphNode, Scene
from comgra_decl.viewer.model.numbers import number, shape
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.words import order_of_operations, pass_label
from comgra_decl.viewer.palette import GREY, SCALE, colour_at, signed_colour

Edges = tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and edges between nodes (source, sink, whether the edge carries a gradient)."""

    nodes: tuple[GraphNode, ...]
    edges: Edges


@dataclass(frozen=True, slots=True)
class Scale:
    """How a number becomes a colour: linear or logarithmic between `low` and `high`.

    `diverging` scales are symmetric about 0.
    """

    low: float
    high: float
    logarithmic: bool = False
    diverging: bool = False

    def colour(self, value: float) -> str:
        """Returns the colour of a finite value; outside the range the nearest end."""
        if self.diverging:
            return signed_colour(value / self.high if self.high else 0.0)
        if self.logarithmic:
            if value <= 0:
                return colour_at(0.0)
            place = math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)
        else:
            place = (value - self.low) / ((self.high - self.low) or 1.0)
        return colour_at(place)


def graph_of(view: RunView, at: Selection) -> Graph:
    """Returns the graph valid at the selected step, with all nodes of the run."""
    nodes = tuple(
        GraphNode(name, view.kind(name), order, _title(view, name))
        for order, name in enumerate(view.nodes)
    )
    structure = None if at.step is None else view.structure(at.step, at.type)
    if structure is None:
        return Graph(nodes, ())
    links: dict[tuple[str, str], bool] = {}
    for source, sink, gradient in structure.edges:
        pair = (structure.keys[source].node, structure.keys[sink].node)
        if pair[0] != pair[1]:
            links[pair] = links.get(pair, False) or gradient
    return Graph(nodes, tuple((a, b, grad) for (a, b), grad in links.items()))


def info_of(view: RunView, at: Selection, edges: Edges) -> str:
    """Returns one line about the selected node."""
    if not at.node:
        return ""
    into = sum(sink == at.node for _, sink, _ in edges)
    out = sum(source == at.node for source, _, _ in edges)
    parts = [at.node, view.kind(at.node), _title(view, at.node), f"{into} in, {out} out"]
    return " \u00b7 ".join(part for part in parts if part)


def heat_of(
    view: RunView, at: Selection, scene: Scene, pass_: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns the paint of every box, and the legend: the selected statistic of one pass.

    A fold shows its own module's value, or else the largest magnitude inside it; it is hatched as
    soon as anything inside is NaN or infinite.
    """
    scale = _scale(view, at, pass_)
    values = _node_values(view, at, pass_)
    paint = {box.id: _paint(box.members, values, scale) for box in scene.boxes}
    return {box: p for box, p in paint.items() if p is not None}, _legend(at, pass_, scale)


def _title(view: RunView, name: str) -> str:
    slot = view.lead(name)
    parts = [slot.module_class, shape(slot.shape), slot.dtype]
    return " \u00b7 ".join(part for part in parts if part)


def _node_values(view: RunView, at: Selection, pass_: str) -> dict[str, tuple[float, bool]]:
    """Returns for each recorded node its value and whether it holds NaN or infinities."""
    if at.step is None:
        return {}
    row = view.row(at.step, at.type, at.over)
    counts, numbers = row["nonfinite"].to_dict(), row[at.statistic].to_dict()
    values: dict[str, tuple[float, bool]] = {}
    for name in view.nodes:
        slot = _painted_slot(view, at, name, pass_)
        count = counts.get(slot, math.nan) if slot is not None else math.nan
        if slot is not None and not math.isnan(count):
            value = float(numbers[slot])
            values[name] = value, count > 0 or not math.isfinite(value)
    return values


def _painted_slot(view: RunView, at: Selection, node: str, pass_: str) -> int | None:
    """Returns the slot that paints a node: the selected tensor itself, else its first role."""
    roles = [at.role] if node == at.node else view.roles(node)
    for role in roles:
        iterations = view.iterations(node, role)
        wanted = at.iteration if at.iteration in iterations else iterations[-1]
        slot = view.passes(node, role, wanted).get(pass_)
        if slot is not None:
            return slot.id
    return None


def _paint(
    members: tuple[str, ...], values: dict[str, tuple[float, bool]], scale: Scale
) -> dict[str, Any] | None:
    known = [values[name] for name in members if name in values]
    if not known:
        return None
    own = values.get(members[0])
    value = own[0] if own else max((v for v, _ in known), key=_magnitude)
    hatched = any(broken for _, broken in known)
    fill = scale.colour(value) if math.isfinite(value) else GREY
    return {"fill": fill, "text": number(value), "hatched": hatched}


def _magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)


def _scale(view: RunView, at: Selection, pass_: str) -> Scale:
    key = ("scale", at.statistic, pass_, at.over, at.type)
    return view.now(key, lambda: scale_of(_known(view, at, pass_)))


def _known(view: RunView, at: Selection, pass_: str) -> NDArray[np.float64]:
    values = view.heat(at.statistic, pass_, at.over, at.type).to_numpy(float)
    known: NDArray[np.float64] = values[np.isfinite(values)]
    return known


def scale_of(values: NDArray[np.float64]) -> Scale:
    """Returns the scale for all values of a run: one for all steps, so that colours compare.

    The outermost percent on each side saturates. Signed values get a diverging scale; positive
    ones that span more than two orders of magnitude a logarithmic one.
    """
    if not len(values):
        return Scale(0.0, 1.0)
    low, high = (float(q) for q in np.quantile(values, [0.01, 0.99]))
    if low < 0:
        limit = max(-low, high)
        return Scale(-limit, limit, diverging=True)
    positive = values[values > 0]
    if len(positive) and high > 0:
        floor = float(np.quantile(positive, 0.01))
        if high / floor > 100:
            return Scale(floor, high, logarithmic=True)
    return Scale(low, high)


def _legend(at: Selection, pass_: str, scale: Scale) -> dict[str, Any]:
    places = np.linspace(-1, 1, len(SCALE)) if scale.diverging else np.linspace(0, 1, len(SCALE))
    paint = signed_colour if scale.diverging else colour_at
    return {
        "title": f"{pass_label(pass_)} \u00b7 {at.statistic}",
        "low": number(scale.low, digits=3),
        "high": number(scale.high, digits=3),
        "colors": [paint(float(place)) for place in places],
        "log": scale.logarithmic,
        "help": order_of_operations(at.statistic, at.over) + ". One scale for all steps.",
    }
