"""Columns and rows for a directed graph of small integers.

Uses the classical layered method (Sugiyama, Tagawa and Toda 1981): break cycles, assign a column to
every vertex, then sort each column by the mean position of the vertices' neighbours. Vertices are
numbered by first execution. Ties are broken by this number, so the same graph always gives the same
drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Edge = tuple[int, int]

#: Half of the sweeps go right, half left. More sweeps did not change recorded or random graphs.
_SWEEPS = 6


@dataclass(frozen=True)
class Digraph:
    """An acyclic graph of the vertices `0 .. size - 1`.

    Attributes:
        before: Predecessors of each vertex.
        after: Successors of each vertex.
        ranked: All vertices in topological order.
    """

    before: list[list[int]]
    after: list[list[int]]
    ranked: list[int]


def acyclic(size: int, edges: Sequence[Edge]) -> Digraph:
    """Return the graph without the edges that close a cycle against execution order.

    An edge is omitted only if it lies on a cycle and its sink first ran no later than its source.
    """
    before, after = _neighbours(size, edges)
    ranked = _topological(before, after)
    if len(ranked) < size:
        component = _components(before, after)
        kept = [(u, v) for u, v in edges if component[u] != component[v] or u < v]
        before, after = _neighbours(size, kept)
        ranked = _topological(before, after)
    return Digraph(before, after, ranked)


def columns(graph: Digraph, inputs: Sequence[bool], constants: Sequence[bool]) -> list[int]:
    """Return the column of each vertex: the length of the longest path to it from the left.

    Inputs, constants, and vertices computed only from constants are placed immediately before their
    first consumer instead of far to the left.

    Args:
        graph: The graph.
        inputs: Which vertices are external inputs that vary from step to step.
        constants: Which vertices are external and persist, like parameters.
    """
    column, loose = [0] * len(graph.ranked), list(constants)
    for vertex in graph.ranked:
        near = graph.before[vertex]
        if near:
            column[vertex] = 1 + max([column[u] for u in near])
            loose[vertex] = False not in [loose[u] for u in near]
    for vertex in reversed(graph.ranked):
        movable = loose[vertex] or (inputs[vertex] and not graph.before[vertex])
        if movable and graph.after[vertex]:
            column[vertex] = min([column[v] for v in graph.after[vertex]]) - 1
    return column


def sorted_columns(graph: Digraph, column: Sequence[int]) -> list[list[int]]:
    """Return the vertices of each column from top to bottom, with few crossings."""
    grid: list[list[int]] = [[] for _ in range(max(column, default=-1) + 1)]
    for vertex, number in enumerate(column):
        grid[number].append(vertex)
    place = [0.0] * len(column)
    for rows in grid:
        _settle(rows, place)
    crowded = [rows for rows in grid if len(rows) > 1]
    for sweep in range(_SWEEPS):
        if sweep % 2 == 0:
            _sweep(crowded, graph.before, place)
        else:
            _sweep(crowded[::-1], graph.after, place)
    return grid


def _sweep(grid: list[list[int]], near: list[list[int]], place: list[float]) -> None:
    """Sort each column by the mean position of the neighbours on one side."""
    at = place.__getitem__
    for rows in grid:
        want = [
            (sum(map(at, near[v])) / len(near[v]), v) if near[v] else (place[v], v) for v in rows
        ]
        want.sort()
        rows[:] = [v for _, v in want]
        _settle(rows, place)


def _settle(rows: list[int], place: list[float]) -> None:
    """Store the positions of a column's vertices, relative to its middle."""
    at = (1 - len(rows)) / 2
    for vertex in rows:
        place[vertex] = at
        at += 1


def _neighbours(size: int, edges: Sequence[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the predecessors and the successors of each of `size` vertices."""
    before: list[list[int]] = [[] for _ in range(size)]
    after: list[list[int]] = [[] for _ in range(size)]
    for source, sink in edges:
        before[sink].append(source)
        after[source].append(sink)
    return before, after


def _topological(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Return the vertices with sources before sinks; vertices behind a cycle are missing."""
    waiting = list(map(len, before))
    ranked = [vertex for vertex, count in enumerate(waiting) if not count]
    for vertex in ranked:  # grows during iteration
        for sink in after[vertex]:
            waiting[sink] -= 1
            if not waiting[sink]:
                ranked.append(sink)
    return ranked


def _components(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Return the strongly connected component of each vertex (Kosaraju's two passes)."""
    component = [-1] * len(before)
    for root in reversed(_finish_order(after)):
        if component[root] < 0:
            component[root], stack = root, [root]
            while stack:
                for vertex in before[stack.pop()]:
                    if component[vertex] < 0:
                        component[vertex] = root
                        stack.append(vertex)
    return component


def _finish_order(after: list[list[int]]) -> list[int]:
    """Return the vertices in the order in which a depth-first search leaves them."""
    seen, finished = [False] * len(after), list[int]()
    for root in range(len(after)):
        if seen[root]:
            continue
        seen[root], stack = True, [(root, iter(after[root]))]
        while stack:
            vertex, rest = stack[-1]
            step = next((sink for sink in rest if not seen[sink]), None)
            if step is None:
                finished.append(vertex)
                stack.pop()
            else:
                seen[step] = True
                stack.append((step, iter(after[step])))
    return finished
