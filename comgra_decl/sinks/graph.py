"""The recorded dependency graph between nodes, as other programs draw it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comgra_decl.records import EARLIER_STEP, SlotInfo, SlotKey, Structure

_RANK = ("loss", "computed", "target", "input", "buffer", "parameter")
"""Kinds from the most to the least telling; a module with parameters is `computed`."""


@dataclass(frozen=True)
class Node:
    """A node of the graph.

    Attributes:
        name: module path or annotated name; unique.
        label: class of the module or, for other nodes, the kind.
        kind: input, parameter, buffer, computed, target or loss.
        shape: shape of its tensor in its first record; None if unknown.
        dtype: dtype of its tensor; "" if unknown.
        attributes: shapes of its parameters, by role.
    """

    name: str
    label: str
    kind: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    attributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge:
    """A tensor of `source` from which `sink` was computed.

    Attributes:
        source: the node.
        sink: the node.
        gradient: whether it carries a gradient.
        effect: in a circuit, the mean effect of the path; None for what is within a module.
    """

    source: str
    sink: str
    gradient: bool
    effect: float | None = None


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of execution and edges, each pair once and none within a node."""

    hash: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def ordered(self) -> tuple[list[Node], set[tuple[str, str]]]:
        """Return the nodes such that sources precede sinks, and the edges that contradict this.

        A module that is called again after its own consumers closes a cycle. Its closing edges are
        those that lead to a node already placed when everything else is blocked.
        """
        order = {node.name: i for i, node in enumerate(self.nodes)}
        left: dict[str, set[str]] = {node.name: set() for node in self.nodes}
        for edge in self.edges:
            left[edge.sink].add(edge.source)
        found: list[Node] = []
        closing: set[tuple[str, str]] = set()
        while left:
            free = [name for name in left if not left[name]] or [min(left, key=order.__getitem__)]
            for name in free:
                closing |= {(source, name) for source in left.pop(name)}
                found.append(self.nodes[order[name]])
            for sources in left.values():
                sources.difference_update(free)
        return found, closing


def graph_of(structure: Structure, slots: Iterable[SlotInfo]) -> Graph:
    """Return the graph between the nodes of a structure, described by the slot table.

    A tensor from an earlier step is a node of its own, such as "cell (earlier step)".
    """
    known = {slot.key: slot for slot in slots}
    members: dict[str, list[tuple[SlotKey, str]]] = {}
    for key, kind in zip(structure.keys, structure.kinds, strict=True):
        members.setdefault(_node_of(key), []).append((key, kind))
    edges: dict[tuple[str, str], bool] = {}
    for source, sink, gradient in structure.edges:
        pair = _node_of(structure.keys[source]), _node_of(structure.keys[sink])
        if pair[0] != pair[1]:
            edges[pair] = edges.get(pair, False) or gradient
    return Graph(
        structure.hash,
        tuple(_node(name, found, known) for name, found in members.items()),
        tuple(Edge(*pair, gradient) for pair, gradient in edges.items()),
    )


def _node_of(key: SlotKey) -> str:
    return key.node + EARLIER_STEP * key.role.endswith(EARLIER_STEP)


def _node(name: str, found: list[tuple[SlotKey, str]], known: Mapping[SlotKey, SlotInfo]) -> Node:
    ranked = sorted(found, key=lambda each: _RANK.index(each[1]) if each[1] in _RANK else 9)
    key, kind = ranked[0]
    slot = known.get(key)
    module = next((s.module_class for k, _ in found if (s := known.get(k)) is not None), "")
    attributes = {
        k.role: info.shape
        for k, each in found
        if each in ("parameter", "buffer") and (info := known.get(k)) is not None
    }
    shape, dtype = (None, "") if slot is None else (slot.shape, slot.dtype)
    return Node(name, module or kind, kind, shape, dtype, attributes)


def plain(graph: Graph) -> dict[str, Any]:
    """Return the graph as JSON data."""
    return {
        "hash": graph.hash,
        "directed": True,
        "nodes": [
            {
                "id": node.name,
                "class": node.label,
                "kind": node.kind,
                "shape": None if node.shape is None else list(node.shape),
                "dtype": node.dtype,
                "parameters": {role: list(shape) for role, shape in node.attributes.items()},
            }
            for node in graph.nodes
        ],
        "edges": [
            {"source": edge.source, "target": edge.sink, "gradient": edge.gradient}
            | ({} if edge.effect is None else {"effect": edge.effect})
            for edge in graph.edges
        ],
    }
