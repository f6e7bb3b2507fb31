"""Indices among the inputs that reach only a part of what they index."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from comgra_decl.rules.api import (
    Count,
    FactRule,
    Finding,
    Place,
    Rule,
    RuleParameters,
    Scene,
    SlotInfo,
    Window,
    per_run,
)

_REACHED = 0.5  # share of the nodes
_SIZES = 3  # numbers of nodes; graphs may be padded to one or two
_PADDED = 8  # divides the sizes to which graphs are padded
_EDGES = 16  # from which a direction is no coincidence


class EdgeParameters(RuleParameters):
    """Options of `unreached_nodes`."""

    least: Count = 3
    """Number of records required."""


class UnreachedNodes(Rule):
    """Edges of batched graphs that all belong to the first nodes."""

    name = "unreached_nodes"
    certainty = 0.8
    statistics = ("max",)
    definition = (
        "A model receives a list of edges, an integer tensor of shape [2, edges], and another "
        "input with one row per node. In at least `least` records and in all of them, no edge "
        f"contains an index of {_REACHED:.0%} of the nodes or more. The rule ignores edges with "
        "fewer than half as many columns as there are nodes, graphs of fewer than 8 nodes, lists "
        "of edges beside another one that reaches more nodes, and runs with fewer than "
        f"{_SIZES} different numbers of nodes, as graphs may be padded to these."
    )
    source = (
        "PyTorch Geometric, Advanced Mini-Batching: the edges of each graph are shifted by the "
        "number of nodes before it."
    )
    advice = (
        "When graphs are joined to a batch, add the number of nodes in the preceding graphs to the "
        "edges of each graph."
    )
    Parameters = EdgeParameters

    # for each list of edges: step of the first record, number of records, largest share
    _seen: dict[int, tuple[int, int, float]] = per_run(dict)
    _nodes: dict[int, set[int]] = per_run(dict)  # numbers of nodes so far

    def look(self, window: Window) -> None:
        """Compare the largest index with the number of nodes."""
        table = window.table
        edges = np.flatnonzero(table.where(_are_edges))
        nodes = np.flatnonzero(table.where(_has_rows))
        if not len(edges) or not len(nodes) or not window.has("max"):
            return
        counts = window.of_shape(_rows, nodes).max(1, keepdims=True)
        highest = window.read("max", edges, "abs_max") + 1
        columns = window.of_shape(_columns, edges)
        valid = np.isfinite(highest) & (counts >= 8) & (2 * columns >= counts)
        for at, slot in enumerate(edges.tolist()):
            for row in np.flatnonzero(valid[:, at]).tolist():
                step, records, share = self._seen.get(slot, (int(window.steps[row]), 0, 0.0))
                share = max(share, float(highest[row, at] / counts[row, 0]))
                self._seen[slot] = step, records + 1, share
                self._nodes.setdefault(slot, set()).add(int(counts[row, 0]))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first list of edges that reaches too few nodes."""
        for slot, (step, records, share) in self._seen.items():
            sizes = self._nodes[slot]
            if records < self.parameters.least or share > _REACHED or len(sizes) < _SIZES:
                continue
            if any(other > _REACHED for _, _, other in self._seen.values()):
                continue  # another list of edges reaches the other nodes
            place = scene.table.place(slot)
            return [
                self.finding(
                    scene,
                    place=place,
                    first_step=step,
                    message=f"The edges ({place}) reach at most the first {share:.0%} of the nodes "
                    f"({min(sizes)} to {max(sizes)}); no edge contains an index of the others.",
                    evidence={"share": share, "records": records},
                )
            ]
        return self._of_messages(scene)

    def _of_messages(self, scene: Scene) -> list[Finding]:
        """Judge the indices by which messages are passed."""
        facts = [f for f in scene.told("messages") if f["nodes"] >= 8]
        facts = [f for f in facts if 2 * f["edges"] >= f["nodes"]]
        sizes = {int(fact["nodes"]) for fact in facts}
        share = max((fact["reached"] / fact["nodes"] for fact in facts), default=1.0)
        padded = all(size % _PADDED == 0 for size in sizes)
        if len(sizes) < 2 or padded or share > _REACHED:  # only the first records are told
            return []
        return [
            self.finding(
                scene,
                place=Place(str(facts[0]["where"])),
                first_step=0,
                message=f"The edges along which {facts[0]['where']} passes messages reach at most "
                f"the first {share:.0%} of the nodes ({min(sizes)} to {max(sizes)}); no edge "
                "contains an index of the others.",
                evidence={"share": share},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        known = bool(self._seen) or bool(scene.told("messages"))
        return None if known else "no model receives edges and rows for nodes"


def _is_given(info: SlotInfo) -> bool:
    first = info.key.node == "input" and info.key.iteration == 0
    return info.kind == "input" and info.key.pass_ == "forward" and first


def _are_edges(info: SlotInfo) -> bool:
    return _is_given(info) and "int" in info.dtype and len(info.shape) == 2 and info.shape[0] == 2


def _has_rows(info: SlotInfo) -> bool:
    return _is_given(info) and bool(info.shape) and info.shape[0] > 2


def _rows(info: SlotInfo) -> float:
    return float(info.shape[0]) if info.shape else 0.0


def _columns(info: SlotInfo) -> float:
    return float(prod(info.shape[1:])) if info.shape else 0.0


class OwnMessages(FactRule):
    """Messages that nodes of a graph receive only from themselves."""

    name = "own_messages"
    certainty = 0.8
    definition = (
        "In the first records, rows with a gradient are gathered by an index, and `index_add`, "
        "`scatter_add` or a similar function sums as many rows by the same index. No rows are "
        "gathered by another index of this length, or only narrower ones (such as weights of "
        "edges) and rows from which the summed ones are not computed element by element. The sum "
        "of each node thus contains only its own row."
    )
    source = (
        "Gilmer et al., Neural Message Passing for Quantum Chemistry (2017): the message of an "
        "edge is computed from its source and added to its target. Our own definition."
    )
    advice = "Gather by the sources and add to the targets: out.index_add_(0, dst, h[src])."
    kind = "own messages"
    shown = ("rows",)

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds {fact['rows']} messages to the nodes from which they were "
            "gathered: both use the same index, so no information passes between nodes."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _pooled_missing(scene)


class OneWayMessages(FactRule):
    """Messages that pass along each edge in one direction only."""

    name = "one_way_messages"
    severity = "hint"
    certainty = 0.55
    definition = (
        "In the first records, rows are gathered and added to other rows along at least "
        f"{_EDGES} edges, all of which lead from a smaller to a larger index, or all from a larger "
        "to a smaller one. No sum uses the reverse edges, so each node hears only one side of its "
        "neighbours. This is right for directed graphs whose nodes are in order."
    )
    source = (
        "PyTorch Geometric, `to_undirected`: an undirected edge is stored once for each direction. "
        "Our own definition."
    )
    advice = (
        "If edges have no direction, add their reverse: torch.cat([edges, edges.flip(0)], 1), and "
        "repeat their attributes."
    )
    kind = "messages"
    shown = ("edges", "nodes")

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the messages, if all have the same direction."""
        found = super().chosen(scene)
        up, every = (sum(int(fact[name]) for fact in found) for name in ("upwards", "edges"))
        return found if every >= _EDGES and up in (0, every) else []

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        order = "larger" if fact["upwards"] else "smaller"
        return (
            f"{fact['where']} passes messages along {fact['edges']} edges, all of them to the node "
            f"with the {order} index. None of the edges is used in the other direction."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.told("messages") else "no messages between nodes in the first records"


class UnsortedPooling(FactRule):
    """Nodes that are pooled into graphs by an index that is not sorted."""

    name = "unsorted_pooling"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In the first records, `index_add`, `scatter_add` or a similar function adds rows into as "
        "many rows as a loss has targets, fewer than half as many as it adds, and the index of the "
        "rows is not sorted. The nodes of a batch of graphs usually follow each other graph by "
        "graph, so their graph numbers ascend."
    )
    source = "PyTorch Geometric, Advanced Mini-Batching: the `batch` vector. Our own definition."
    advice = (
        "Check the index: torch.repeat_interleave(torch.arange(graphs), nodes_per_graph) gives the "
        "graph of each node."
    )
    kind = "pooled"
    shown = ("rows", "into")

    def chosen(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the sums into one row per target whose index is not sorted."""
        targets = {call.target.shape[0] for call in scene.calls if call.target.shape}
        return [
            fact
            for fact in super().chosen(scene)
            if fact["into"] in targets and 2 * fact["into"] <= fact["rows"] and not fact["sorted"]
        ]

    def sentence(self, fact: Mapping[str, Any]) -> str:
        """Return the message about a fact."""
        return (
            f"{fact['where']} adds {fact['rows']} rows into {fact['into']} rows, one per target, "
            "by an index that is not sorted: nodes may be added to the wrong graphs."
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return _pooled_missing(scene)


def _pooled_missing(scene: Scene) -> str | None:
    known = bool(scene.told("pooled"))
    return None if known else "no rows are added by an index in the first records"
