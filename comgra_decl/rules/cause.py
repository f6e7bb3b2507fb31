"""Follows a finding through the dependency graph to where it probably began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from comgra_decl.records import SlotKey, Structure
from comgra_decl.rules.base import Scene
from comgra_decl.rules.finding import Finding, Link, Place
from comgra_decl.rules.table import is_gradient
from comgra_decl.rules.unusual import Unusual

MOST_LINKS = 12
"""A longer chain is shown without its middle."""


class Causes:
    """Walks from a finding to the earliest tensor that is unusual.

    Values come from what is upstream of them, gradients from what is downstream. A walk goes on
    while the next tensor is unusual itself (a rule says so, or its size does) and was so no later
    than the finding began. The cause is the tensor that was so first; of several, the one that
    a step comes to first.

    Args:
        scene: the run.
        marks: for slots that rules found something about, the first step and the rule.
        unusual: the sizes of all tensors.
    """

    def __init__(
        self, scene: Scene, marks: Mapping[int, tuple[int, str]], unusual: Unusual
    ) -> None:
        self._scene, self._marks, self._unusual = scene, marks, unusual
        graph = scene.structure
        self._upstream, self._downstream = ({}, {}) if graph is None else _neighbours(graph)

    def with_chain(self, finding: Finding) -> Finding:
        """Returns the finding with its chain, the probable cause first, where there is one."""
        place = finding.place
        if place is None or finding.chain:
            return finding
        path = self._walk(SlotKey(*_key(place)), finding.first_step)
        if len(path) < 2:
            return finding
        began = finding.first_step
        here = Link(place, began, finding.rule)
        links = [*(self._link(key, began) for key in reversed(path[1:])), here]
        if len(links) > MOST_LINKS:
            links = [*links[: MOST_LINKS // 2], *links[-MOST_LINKS // 2 :]]
        return replace(finding, chain=tuple(links))

    def _walk(self, start: SlotKey, until: int) -> list[SlotKey]:
        """Returns the way to the earliest unusual tensor, breadth first; `start` comes first."""
        next_to = self._downstream if is_gradient(start.pass_) else self._upstream
        before: dict[SlotKey, SlotKey | None] = {start: None}
        began = {start: until}
        waiting = [start]
        for key in waiting:
            for other in next_to.get(key._replace(pass_="forward"), ()):
                there = other._replace(pass_=start.pass_)
                first = self._began(there, until)
                if there not in before and first is not None:
                    before[there], began[there] = key, first
                    waiting.append(there)
        backward = is_gradient(start.pass_)
        step: SlotKey | None = min(
            reversed(waiting), key=lambda key: (began[key], self._turn(key, backward=backward))
        )
        path: list[SlotKey] = []
        while step is not None:
            path.insert(0, step)
            step = before[step]
        return path

    def _turn(self, key: SlotKey, *, backward: bool) -> int:
        """Returns a number that is the smaller the earlier a step comes to a tensor."""
        table = self._scene.table
        turn = int(table.order[table.by_key[key]]) if key in table.by_key else 0
        return -turn if backward else turn

    def _began(self, key: SlotKey, until: int) -> int | None:
        """Returns since which step a tensor is unusual, None if it was not by `until`."""
        found = self._unusual_by(key, until)
        return None if found is None else found[0]

    def _unusual_by(self, key: SlotKey, until: int) -> tuple[int, str] | None:
        slot = self._scene.table.by_key.get(key, -1)
        mark = self._marks.get(slot)
        return mark if mark is not None and mark[0] <= until else self._unusual.of(slot, until)

    def _link(self, key: SlotKey, until: int) -> Link:
        found = self._unusual_by(key, until)
        assert found is not None  # else it would not be on the way
        return Link(Place(key.node, key.role, key.iteration, key.pass_), *found)


def _key(place: Place) -> tuple[str, str, int, str]:
    return place.node, place.role, place.iteration, place.pass_


def _neighbours(
    graph: Structure,
) -> tuple[dict[SlotKey, list[SlotKey]], dict[SlotKey, list[SlotKey]]]:
    upstream: dict[SlotKey, list[SlotKey]] = {}
    downstream: dict[SlotKey, list[SlotKey]] = {}
    for source, sink, _ in graph.edges:
        a, b = graph.keys[source], graph.keys[sink]
        if a != b:
            upstream.setdefault(b, []).append(a)
            downstream.setdefault(a, []).append(b)
    return upstream, downstream
