"""The effects of paths on the recorded graph: which of its edges each path leads through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from comgra_decl.records import EARLIER_STEP, Structure

from .circuits import Circuit

Pair = tuple[str, str]


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
    modules = {*circuit.nodes.values()}
    after: dict[str, list[str]] = {}
    before: dict[str, list[str]] = {}
    for source, sink in _edges(structure):
        after.setdefault(source, []).append(sink)
        before.setdefault(sink, []).append(source)
    through: dict[Pair, list[Pair]] = {}
    unplaced = []
    for pair in paths:
        edges = _ways(*pair, modules, after, before)
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


def _edges(structure: Structure) -> Iterator[Pair]:
    """Yield the edges between nodes, without parameters and without tensors of earlier steps."""
    keys, kinds = structure.keys, structure.kinds
    apart = [
        kind in ("parameter", "buffer") or key.role.endswith(EARLIER_STEP)
        for key, kind in zip(keys, kinds, strict=True)
    ]
    seen: set[Pair] = set()
    for source, sink, _ in structure.edges:
        pair = keys[source].node, keys[sink].node
        if not (apart[source] or apart[sink] or pair[0] == pair[1] or pair in seen):
            seen.add(pair)
            yield pair


def _ways(
    source: str,
    sink: str,
    modules: Iterable[str],
    after: Mapping[str, list[str]],
    before: Mapping[str, list[str]],
) -> set[Pair]:
    """Return the edges on all ways from one module into another that pass through no third one."""
    others = [m for m in modules if not (_within(source, m) or _within(sink, m))]

    def blocked(node: str) -> bool:
        return node != source and any(_within(node, module) for module in others)

    forth = _reached(source, after, blocked, ends=lambda node: _within(node, sink))
    entries = {node for node in forth if _within(node, sink) and node != source}
    back: set[str] = set()
    for entry in entries:
        back |= _reached(entry, before, blocked, ends=lambda node: node == source)
    found = set()
    for node in forth & back:
        if _within(node, sink) and node != source:
            continue
        found |= {
            (node, other) for other in after.get(node, ()) if other in forth and other in back
        }
    return found


def _reached(
    start: str,
    links: Mapping[str, list[str]],
    blocked: Callable[[str], bool],
    *,
    ends: Callable[[str], bool],
) -> set[str]:
    """Return the nodes that can be reached, without going on beyond those that end the way."""
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node != start and ends(node):
            continue
        for other in links.get(node, ()):
            if other not in seen and not blocked(other):
                seen.add(other)
                waiting.append(other)
    return seen


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")
