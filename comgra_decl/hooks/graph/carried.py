"""Preserve the edges from earlier steps when a graph is captured again.

An edge from an earlier step is visible only if that step was followed too. If it was not, the graph
borrows these edges from another step with the same execution path: the most recent one whose
preceding step was followed. Records of steps that are not followed at all do the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from comgra_decl.hooks.graph.structure_hash import stable_hash
from comgra_decl.records import EARLIER_STEP

if TYPE_CHECKING:
    from comgra_decl.records import SlotKey, Structure


class _Edge(NamedTuple):
    source: SlotKey
    kind: str
    sink: SlotKey


class Carried:
    """The edges from earlier steps, for each execution path."""

    def __init__(self) -> None:
        self._edges: dict[int, set[_Edge]] = {}
        self._followed = -2  # the last step that was followed

    def complete(self, structure: Structure, signature: int, *, step: int) -> Structure:
        """Return the structure extended by the edges that are not visible in this step alone."""
        seen = self._followed == step - 1
        self._followed = step
        if seen:
            self._edges[signature] = set(_from_earlier(structure))
            return structure
        missing = self._edges.get(signature, set()) - set(_from_earlier(structure))
        return _with(structure, sorted(missing)) if missing else structure


def _from_earlier(structure: Structure) -> list[_Edge]:
    keys, kinds = structure.keys, structure.kinds
    edges = ((keys[s], kinds[s], keys[t]) for s, t, _ in structure.edges)
    return [_Edge(*edge) for edge in edges if edge[0].role.endswith(EARLIER_STEP)]


def _with(structure: Structure, added: list[_Edge]) -> Structure:
    keys, kinds, edges = list(structure.keys), list(structure.kinds), list(structure.edges)
    for source, kind, sink in added:
        if sink not in keys:
            continue
        if source not in keys:
            keys.append(source)
            kinds.append(kind)
        edges.append((keys.index(source), keys.index(sink), False))
    edges.sort()
    name = stable_hash(keys, kinds, edges)
    return replace(structure, hash=name, keys=keys, kinds=kinds, edges=edges)
