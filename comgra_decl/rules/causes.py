"""Traces a finding through the dependency graph to its probable cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotKey, Structure
from comgra_decl.rules.base import Scene
from comgra_decl.rules.finding import Finding, Link, Place
from comgra_decl.rules.memory import Early, Slots, Streak, row_quantile
from comgra_decl.rules.table import SlotTable, is_gradient
from comgra_decl.rules.window import Window

_Neighbours = dict[SlotKey, list[SlotKey]]

MOST_LINKS = 12
"""Maximum length of a chain; the middle of longer chains is omitted."""


class Causes:
    """Traces a finding back to the earliest unusual tensor.

    Unusual values are caused upstream, and unusual gradients downstream. The search continues as
    long as the next tensor is also unusual, and was so when the finding began. A tensor is unusual
    if it is part of a rule's finding or has an unusual magnitude. The cause is the tensor that
    became unusual first. If there are several, it is the one that is computed first in a step.

    Args:
        scene: facts about the run.
        marks: for each slot that a rule reports, the first step and the rule.
        unusual: the magnitudes of all tensors.
    """

    def __init__(
        self, scene: Scene, marks: Mapping[int, tuple[int, str]], unusual: Unusual
    ) -> None:
        self._scene, self._marks, self._unusual = scene, marks, unusual

    @cached_property
    def _neighbours(self) -> tuple[_Neighbours, _Neighbours]:
        """The tensors before and after each tensor; most runs have no finding that needs them."""
        graph = self._scene.structure
        return ({}, {}) if graph is None else _neighbours(graph)

    def with_chain(self, finding: Finding) -> Finding:
        """Return the finding with its chain of causes, if any; the probable cause comes first."""
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
        """Return the path from `start` to the earliest unusual tensor, by breadth-first search."""
        upstream, downstream = self._neighbours
        next_to = downstream if is_gradient(start.pass_) else upstream
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
        """Return a sort key that is smaller for tensors computed earlier in a step."""
        table = self._scene.table
        turn = int(table.order[table.by_key[key]]) if key in table.by_key else 0
        return -turn if backward else turn

    def _began(self, key: SlotKey, until: int) -> int | None:
        """Return the step at which a tensor became unusual; None if that was after `until`."""
        found = self._unusual_by(key, until)
        return None if found is None else found[0]

    def _unusual_by(self, key: SlotKey, until: int) -> tuple[int, str] | None:
        slot = self._scene.table.by_key.get(key, -1)
        mark = self._marks.get(slot)
        return mark if mark is not None and mark[0] <= until else self._unusual.of(slot, until)

    def _link(self, key: SlotKey, until: int) -> Link:
        found = self._unusual_by(key, until)
        assert found is not None  # all tensors on the path are unusual
        return Link(Place(key.node, key.role, key.iteration, key.pass_), *found)


def _key(place: Place) -> tuple[str, str, int, str]:
    return place.node, place.role, place.iteration, place.pass_


def _neighbours(graph: Structure) -> tuple[_Neighbours, _Neighbours]:
    upstream: _Neighbours = {}
    downstream: _Neighbours = {}
    for source, sink, _ in graph.edges:
        a, b = graph.keys[source], graph.keys[sink]
        if a != b:
            upstream.setdefault(b, []).append(a)
            downstream.setdefault(a, []).append(b)
    return upstream, downstream


DECADES = 1.0
"""Minimum deviation of an unusual tensor's magnitude, in powers of ten."""

_SIBLINGS = 3  # number of records required to define a normal magnitude
_FIRST = 5  # number of records that define the normal magnitude
_SIZES = ("l2", "abs_max", "std")  # the first recorded one measures the magnitude


class Unusual:
    """Tracks the magnitude of every tensor, for chains of causes; not a rule itself.

    A tensor is unusual while its magnitude is ten times larger or smaller than in its first five
    records. In the first five records, it is unusual while its magnitude is ten times larger or
    smaller than the median over its siblings. These magnitudes are divided by the square root of
    the number of elements. Siblings are tensors of the same kind, pass and module class. A tensor
    that differs from its siblings from the start can only explain problems that exist from the
    start.
    """

    def __init__(self) -> None:
        self._early = Early(_FIRST)
        self._records = 0
        self._settled = -1  # the last step of these records
        self._own, self._among = Streak(2), Streak(2)
        self._table: SlotTable | None = None
        self._at: Slots = np.zeros(0, np.int64)
        self._groups: list[Slots] = []

    def look(self, window: Window) -> None:
        """Process the next training records."""
        first = window.steps[: max(0, _FIRST - self._records)]
        self._settled = int(first[-1]) if len(first) else self._settled
        self._records += len(window)
        size = next((name for name in _SIZES if window.has(name)), None)
        if size is None:
            return
        if window.table is not self._table:
            self._learn(window.table)
        if not len(self._at):
            return
        with np.errstate(all="ignore"):
            sizes = np.log10(window.read(size, self._at).astype(np.float64))
            if size == "l2":
                sizes -= np.log10(window.elements(self._at)) / 2
        finite = np.where(np.isfinite(sizes), sizes, np.nan)
        own = finite - self._early.look(self._at, finite)
        there = window.present[:, self._at]
        among = np.where(np.isnan(own), self._to_siblings(finite), np.nan)
        for streak, distance in ((self._own, own), (self._among, among)):
            far = np.abs(np.nan_to_num(distance)) > DECADES
            streak.look(window.steps, self._at, hit=far, present=there, evidence=np.abs(distance))

    def _learn(self, table: SlotTable) -> None:
        self._table, self._at = table, np.flatnonzero(table.floating)
        groups: dict[tuple[str, ...], list[int]] = {}
        for column, slot in enumerate(self._at.tolist()):
            info = table.infos[slot]
            role = info.key.role.partition(".")[0]
            name = (info.kind, info.key.pass_, info.module_class, role)
            groups.setdefault(name, []).append(column)
        self._groups = [np.array(g) for g in groups.values() if len(g) >= _SIBLINGS]

    def _to_siblings(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        distance = np.full(sizes.shape, np.nan)
        for columns in self._groups:
            part = sizes[:, columns]
            distance[:, columns] = part - row_quantile(part, 0.5)
        return distance

    def of(self, slot: int, until: int) -> tuple[int, str] | None:
        """Return when and how a slot became unusual; None if it was normal until step `until`."""
        for streak, sentence in (
            (self._own, "its magnitude differs from its first value by a factor of {:.3g}"),
            (self._among, "its magnitude differs from that of its siblings by a factor of {:.3g}"),
        ):
            first = int(streak.first[slot]) if 0 <= slot < len(streak.first) else -1
            from_start = streak is self._among and first <= self._settled < until
            if 0 <= first <= until and not from_start:
                factor = 10 ** min(300.0, float(streak.worst[slot]))
                return first, sentence.format(factor)
        return None
