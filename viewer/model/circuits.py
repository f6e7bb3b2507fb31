"""The strongest paths of an intervention, laid out as a graph from left to right."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.errors import ComgraError
from comgra_decl.query import Circuit
from comgra_decl.spec.interventions import INTO, NODE
from comgra_decl.viewer.graph.layering import acyclic, columns, sorted_columns
from comgra_decl.viewer.graph.places import text_width
from comgra_decl.viewer.model.effects import EffectTable
from comgra_decl.viewer.model.runview import RunView

STRONGEST = (10, 30, 100)
"""Numbers of paths from which the user chooses."""

_HEIGHT, _GAP, _BETWEEN, _MARGIN = 24.0, 10.0, 70.0, 6.0
_PADDING = 16.0


@dataclass(frozen=True, slots=True)
class Spot:
    """A place of a circuit in its drawing, in pixels.

    Attributes:
        name: the place. node: its node.
        x: left edge. y: upper edge. width: its width. height: its height.
    """

    name: str
    node: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """A circuit with the positions of its places.

    Attributes:
        circuit: the circuit.
        spots: the positions, by place.
        width: of the drawing, in pixels. height: the same.
        most: the largest magnitude of an effect at this step.
        wanted: the number of paths that the user asked for.
    """

    circuit: Circuit
    spots: dict[str, Spot]
    width: float
    height: float
    most: float
    wanted: int


def circuit_drawing(view: RunView, table: EffectTable, strongest: int) -> Drawing | None:
    """Return the strongest paths in a table of effects; None if it has no paths."""
    declared = view.run.spec.interventions.get(table.name)
    if declared is None or declared.into is None or not {NODE, INTO} <= {*declared.sweep}:
        return None
    key = ("circuit", table.name, table.step, strongest)
    return view.now(key, lambda: _drawing(view, table, strongest))


def _drawing(view: RunView, table: EffectTable, strongest: int) -> Drawing | None:
    try:
        circuit = view.run.circuit(table.name, table.step, strongest=strongest)
    except ComgraError:
        return None  # the table gives the reason
    order = {node: i for i, node in enumerate(view.run.nodes)}
    names = sorted(circuit.nodes, key=lambda name: order.get(circuit.nodes[name], len(order)))
    number = {name: i for i, name in enumerate(names)}
    pairs = [(link.source, link.sink) for link in circuit.links]
    edges = [(number[a], number[b]) for a, b in (*pairs, *circuit.parts)]
    graph = acyclic(len(names), edges)
    column = columns(graph, [False] * len(names), [False] * len(names))
    grid = sorted_columns(graph, column)
    spots, x = {}, _MARGIN
    tallest = max((len(rows) for rows in grid), default=0)
    height = 2 * _MARGIN + tallest * (_HEIGHT + _GAP) - _GAP
    for rows in grid:
        width = max(text_width(names[vertex]) for vertex in rows) + _PADDING
        y = (height - len(rows) * (_HEIGHT + _GAP) + _GAP) / 2
        for vertex in rows:
            name = names[vertex]
            spots[name] = Spot(name, circuit.nodes[name], x, y, width, _HEIGHT)
            y += _HEIGHT + _GAP
        x += width + _BETWEEN
    most = max((abs(link.effect) for link in circuit.links), default=0.0)
    width = max(x - _BETWEEN + _MARGIN, 2 * _MARGIN)
    return Drawing(circuit, spots, width, max(height, 2 * _MARGIN), most, strongest)
