"""The effects of paths on the recorded graph: which of its edges each path leads through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from comgra_decl.records import EARLIER_STEP, Structure

from .circuits import Circuit

Pair = tuple[str, str]
Call = tuple[str, int]
"""A node and its iteration, by which the calls of a shared module are told apart."""


@dataclass(frozen=True, slots=True)
class EdgeEffects:
    """The paths of an intervention on the edges of the recorded graph, at one step.

    A path leads from the changed module to its receiver, on every way that passes through no other
    module of the intervention. The effect of an edge is the sum over the paths through it.

    Attributes:
        intervention: its name.
        step: the step.
        measure: what the effects are measured by.
        paths: the effect of each pair of a changed module and a receiver, summed over their parts.
        through: the pairs that lead through each edge of the graph.
        unplaced: the pairs for which the graph has no way.
    """

    intervention: str
    step: int
    measure: str
    paths: Mapping[Pair, float]
    through: Mapping[Pair, tuple[Pair, ...]]
    unplaced: tuple[Pair, ...]

    def of(self, edges: Iterable[Pair]) -> tuple[float, list[Pair]]:
        """Return the effect of edges that are drawn as one, and their pairs, the strongest first.

        A pair that leads through several of them counts once.
        """
        pairs = dict.fromkeys(pair for edge in edges for pair in self.through.get(edge, ()))
        ordered = sorted(pairs, key=lambda pair: -abs(self.paths[pair]))
        return sum(self.paths[pair] for pair in ordered), ordered

    def table(self) -> pd.DataFrame:
        """Return one row per edge, the strongest first: effect, number of paths, strongest path."""
        rows: list[tuple[object, ...]] = []
        for edge in self.through:
            effect, pairs = self.of([edge])
            rows.append((*edge, effect, len(pairs), " -> ".join(pairs[0])))
        columns = ["source", "sink", "effect", "paths", "strongest"]
        found = pd.DataFrame(rows, columns=columns).set_index(["source", "sink"])
        return found.sort_values("effect", key=abs, ascending=False, kind="stable")


def edge_effects_of(circuit: Circuit, structure: Structure, *, above: float) -> EdgeEffects:
    """Return a circuit on the edges of a graph; see `Run.edge_effects`."""
    paths: dict[Pair, float] = {}
    for link in circuit.links:
        pair = circuit.nodes[link.source], circuit.nodes[link.sink]
        paths[pair] = paths.get(pair, 0.0) + link.effect
    graph = _graph(structure, {*circuit.nodes.values()})
    through: dict[Pair, list[Pair]] = {}
    unplaced = []
    for pair in paths:
        edges = graph.ways(*pair)
        for edge in edges:
            through.setdefault(edge, []).append(pair)
        if not edges:
            unplaced.append(pair)
    kept = {
        edge: tuple(pairs)
        for edge, pairs in through.items()
        if not above or abs(sum(paths[pair] for pair in pairs)) > above
    }
    return EdgeEffects(
        circuit.intervention, circuit.step, circuit.measure, paths, kept, tuple(unplaced)
    )


def _graph(structure: Structure, modules: Iterable[str]) -> _Graph:
    after: dict[Call, list[Call]] = {}
    before: dict[Call, list[Call]] = {}
    for source, sink in _edges(structure):
        after.setdefault(source, []).append(sink)
        before.setdefault(sink, []).append(source)
    listed = [*modules]
    owners = {
        call: frozenset(module for module in listed if _within(call[0], module))
        for call in {*after, *before}
    }
    return _Graph(after, before, owners)


def _edges(structure: Structure) -> Iterator[tuple[Call, Call]]:
    """Yield the edges between calls, without parameters and without tensors of earlier steps."""
    keys, kinds = structure.keys, structure.kinds
    apart = [
        kind in ("parameter", "buffer") or key.role.endswith(EARLIER_STEP)
        for key, kind in zip(keys, kinds, strict=True)
    ]
    seen: set[tuple[Call, Call]] = set()
    for source, sink, _ in structure.edges:
        calls = tuple((keys[end].node, keys[end].iteration) for end in (source, sink))
        pair = calls[0], calls[1]
        if not (apart[source] or apart[sink] or pair[0] == pair[1] or pair in seen):
            seen.add(pair)
            yield pair


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph of calls of nodes, for ways from module to module.

    Attributes:
        after: the calls after each call. before: those before it.
        owners: the modules of the intervention that the node of a call is, or lies within.
    """

    after: Mapping[Call, list[Call]]
    before: Mapping[Call, list[Call]]
    owners: Mapping[Call, frozenset[str]]

    def ways(self, source: str, sink: str) -> set[Pair]:
        """Return the edges on all ways from one module into another past all other modules.

        A way ends where it enters the sink. A module that contains one of the two is no other one.
        Calls of a module are told apart on the ways, but not in the result.
        """
        allowed = {source, sink}
        for call, owners in self.owners.items():
            if call[0] in (source, sink):
                allowed |= owners
        free = {call for call, owners in self.owners.items() if owners <= allowed}
        starts = {call for call in free if call[0] == source}
        inside = {call for call in free if sink in self.owners[call]} - starts
        forth = _reached(starts, self.after, free, ends=inside)
        back = _reached(forth & inside, self.before, free - inside, ends=starts)
        return {
            (call[0], other[0])
            for call in (forth & back) - inside
            for other in self.after.get(call, ())
            if other in forth and other in back and call[0] != other[0]
        }


def _reached(
    starts: Iterable[Call], links: Mapping[Call, list[Call]], free: set[Call], *, ends: set[Call]
) -> set[Call]:
    """Return the free calls that can be reached, without going on beyond those that end the way."""
    seen = {*starts}
    waiting = [*seen]
    while waiting:
        for other in links.get(waiting.pop(), ()):
            if other in free and other not in seen:
                seen.add(other)
                if other not in ends:
                    waiting.append(other)
    return seen


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")
