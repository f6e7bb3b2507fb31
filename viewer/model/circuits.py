"""The strongest paths of an intervention, laid out as a graph from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from comgra_decl.errors import ComgraError
from comgra_decl.query import Circuit
from comgra_decl.spec.interventions import INTO, NODE
from comgra_decl.viewer.graph.layering import Edge, acyclic, columns, sorted_columns
from comgra_decl.viewer.graph.places import text_width
from comgra_decl.viewer.model.effects import EffectTable
from comgra_decl.viewer.model.runview import RunView

STRONGEST = (10, 30, 100)
"""Numbers of paths from which the user chooses."""

_HEIGHT, _GAP, _BETWEEN, _MARGIN = 24.0, 10.0, 70.0, 6.0
_LANE = 6.0  # the height that a path takes in a column that it passes
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
        lanes: by path (source, sink), where it passes each column between the two, from left to
            right: x of the column's left edge, x of its right edge, and y.
        width: of the drawing, in pixels. height: the same.
        most: the largest magnitude of an effect at this step.
        wanted: the number of paths that the user asked for.
    """

    circuit: Circuit
    spots: dict[str, Spot]
    lanes: dict[tuple[str, str], list[tuple[float, float, float]]]
    width: float
    height: float
    most: float
    wanted: int


def circuit_drawing(view: RunView, table: EffectTable, strongest: int) -> Drawing | None:
    """Return the strongest paths in a table of effects; None if it has no paths."""
    declared = view.spec.interventions.get(table.name)
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
    edges, chains = _in_steps(edges, column)
    grid = sorted_columns(acyclic(len(column), edges), column)
    heights = [_HEIGHT] * len(names) + [_LANE] * (len(column) - len(names))
    height = 2 * _MARGIN + max((_tall(rows, heights) for rows in grid), default=0.0)
    spots, passed, x = {}, {}, _MARGIN
    for rows in grid:
        width = max(text_width(names[v]) for v in rows if v < len(names)) + _PADDING
        y = (height - _tall(rows, heights)) / 2
        for vertex in rows:
            if vertex < len(names):
                name = names[vertex]
                spots[name] = Spot(name, circuit.nodes[name], x, y, width, _HEIGHT)
            else:
                passed[vertex] = (x, x + width, y + _LANE / 2)
            y += heights[vertex] + _GAP
        x += width + _BETWEEN
    lanes = {
        (names[a], names[b]): [passed[vertex] for vertex in chain]
        for (a, b), chain in chains.items()
    }
    most = max((abs(link.effect) for link in circuit.links), default=0.0)
    width = max(x - _BETWEEN + _MARGIN, 2 * _MARGIN)
    return Drawing(circuit, spots, lanes, width, max(height, 2 * _MARGIN), most, strongest)


def _tall(rows: list[int], heights: list[float]) -> float:
    return sum(heights[vertex] for vertex in rows) + _GAP * (len(rows) - 1)


def _in_steps(edges: list[Edge], column: list[int]) -> tuple[list[Edge], dict[Edge, list[int]]]:
    """Return edges between adjacent columns, and the new vertices that stand for each long edge.

    Without them, a path would cross the places in the columns that it passes.

    Args:
        edges: the edges.
        column: of each vertex. Those of the new vertices are appended.
    """
    short: list[Edge] = []
    chains: dict[Edge, list[int]] = {}
    for source, sink in dict.fromkeys(edges):
        between = range(column[source] + 1, column[sink])
        chain = [*range(len(column), len(column) + len(between))]
        column.extend(between)
        chains[source, sink] = chain
        short.extend(pairwise([source, *chain, sink]))
    return short, chains
