"""What happens between two tensors: gains, dead values, and gradient paths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import prod

import numpy as np
import pandas as pd

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import SlotKey, Structure

from . import arrays, graphs
from .snapshot import Snapshot

_PATHS = 10
"""Number of paths that are listed; there may be far more paths."""


@dataclass(frozen=True)
class GradientPath:
    """A path through the graph.

    Attributes:
        nodes: names of the nodes on it, including both ends.
        slots: their slots.
        share: share of the gradient that returns from the sink to the source along this path, from
            0 to 1; NaN if the gradients were not recorded.
    """

    nodes: tuple[str, ...]
    slots: tuple[SlotKey, ...]
    share: float


@dataclass(frozen=True)
class Between:
    """What happens between two tensors in one step; see `Run.between`.

    Attributes:
        source: name of the tensor at the beginning.
        sink: name of the tensor at the end.
        step: the step.
        signal: root mean square of the sink's values, divided by the root mean square of the
            source's values.
        gradient: root mean square of the source's gradient, divided by the root mean square of the
            sink's gradient. Below 1, the gradient shrinks on the way back.
        dead: largest share of zeros in any tensor after the source, up to and including the sink.
        dead_at: name of the tensor with this share.
        paths: the paths that carry most of the gradient, largest share first.
        count: total number of paths from source to sink.
    """

    source: str
    sink: str
    step: int
    signal: float
    gradient: float
    dead: float
    dead_at: str
    paths: tuple[GradientPath, ...]
    count: int

    @property
    def table(self) -> pd.DataFrame:
        """The paths, one row per path: `share`, and the `nodes` joined by arrows."""
        lines = [(path.share, " \u2192 ".join(path.nodes)) for path in self.paths]
        return pd.DataFrame(lines, columns=["share", "nodes"])


def between(
    snapshot: Snapshot, source: SlotKey, sink: SlotKey, step: int | None, type_: str | None
) -> Between:
    """Return what happens between two tensors at a step, by default the last one."""
    steps = snapshot.steps[snapshot.records(type_)]
    if not len(steps):
        raise UnknownNameError("the run has no records.")
    at = int(steps.max()) if step is None else step
    numbers = _Numbers(snapshot, at, type_)
    graph = graphs.structure(snapshot, at, type_)
    flow = _Flow.of(graph, source, sink, numbers)
    inner = [key for key in flow.keys if key != source] or [sink]
    zeros = {key: numbers.of(key, "forward", "zero_fraction") for key in inner}
    known = [key for key in inner if not math.isnan(zeros[key])]
    dead = max(known, key=zeros.__getitem__, default=sink)
    return Between(
        source=_name(source),
        sink=_name(sink),
        step=at,
        signal=_ratio(numbers.rms(sink, "forward"), numbers.rms(source, "forward")),
        gradient=_ratio(numbers.rms(source, "grad"), numbers.rms(sink, "grad")),
        dead=zeros.get(dead, math.nan),
        dead_at=_name(dead),
        paths=tuple(flow.paths()),
        count=flow.count(),
    )


class _Numbers:
    """Statistics of one record by slot."""

    def __init__(self, snapshot: Snapshot, step: int, type_: str | None) -> None:
        rows = arrays.row(snapshot, step, type_, "mean")
        self._place = {slot: i for i, slot in enumerate(rows.ids.tolist())}
        self._values, self._names = rows.values, rows.names
        self._ids = {key: info.id for key, info in snapshot.by_key.items()}
        self._shapes = arrays.shapes(snapshot, step, type_)
        self._infos = snapshot.view.slots

    def of(self, key: SlotKey, pass_: str, statistic: str) -> float:
        """Return a statistic of a tensor, averaged over the batch; NaN if it is not recorded."""
        slot = self._slot(key, pass_)
        if slot not in self._place or statistic not in self._names:
            return math.nan
        return float(self._values[self._place[slot], self._names.index(statistic)])

    def rms(self, key: SlotKey, pass_: str) -> float:
        """Return the root mean square of a tensor: its l2 norm divided by the root of its size."""
        slot = self._slot(key, pass_)
        if slot is None or slot not in self._place:
            return math.nan
        shape, batch = self._shapes[slot], self._infos[slot].batch_dim
        if shape is None:
            return math.nan
        size = prod(n for i, n in enumerate(shape) if i != batch)
        return self.of(key, pass_, "l2") / math.sqrt(size) if size else math.nan

    def _slot(self, key: SlotKey, pass_: str) -> int | None:
        """Return the slot of a pass; of several gradients, the first."""
        exact = self._ids.get(key._replace(pass_=pass_))
        if exact is not None or pass_ != "grad":
            return exact
        found = (k for k in self._ids if k[:3] == key[:3] and k.pass_.partition(":")[0] == "grad")
        return next((self._ids[k] for k in found if k.pass_ != "grad:raw"), None)


@dataclass(frozen=True)
class _Flow:
    """The part of the graph between two tensors: each tensor's readers with their shares.

    The recorded gradient of a tensor is the sum of the contributions from its readers. The
    contributions themselves are not recorded. They are estimated to be proportional to the l2 norms
    of the readers' gradients, because a reader that receives no gradient passes none on.
    """

    source: SlotKey
    sink: SlotKey
    keys: Sequence[SlotKey]  # in topological order
    readers: Mapping[SlotKey, Sequence[tuple[SlotKey, float]]]

    @classmethod
    def of(
        cls, graph: Structure | None, source: SlotKey, sink: SlotKey, numbers: _Numbers
    ) -> _Flow:
        """Return the tensors on any path; edges without a gradient count only if none has one."""
        if graph is None:
            return cls(source, sink, [], {})
        known = set(graph.keys)
        if source not in known or sink not in known:
            return cls(source, sink, [], {})
        for carrying in (True, False):
            edges = [e for e in graph.edges if e[2] or not carrying]
            keys = _on_paths(graph, edges, source, sink)
            if keys:
                break
        inside = set(keys)
        after: dict[SlotKey, list[SlotKey]] = {key: [] for key in keys}
        for u, v, _ in edges:
            if graph.keys[u] in inside and graph.keys[v] in inside:
                after[graph.keys[u]].append(graph.keys[v])
        readers = {key: _shares(list(dict.fromkeys(after[key])), numbers) for key in keys}
        return cls(source, sink, keys, readers)

    def paths(self) -> list[GradientPath]:
        """Return the paths with the largest shares.

        The best paths from a tensor consist of a reader and one of the best paths from that reader.
        """
        best: dict[SlotKey, list[tuple[float, tuple[SlotKey, ...]]]] = {}
        for key in reversed(self.keys):
            if key == self.sink:
                best[key] = [(1.0, (key,))]
                continue
            tried = (
                (share * rest, (key, *path))
                for reader, share in self.readers[key]
                for rest, path in best[reader]
            )
            best[key] = nlargest(_PATHS, tried, key=lambda found: _rank(found[0]))
        found = best.get(self.source, [])
        return [GradientPath(tuple(map(_name, path)), path, share) for share, path in found]

    def count(self) -> int:
        """Return the number of all paths."""
        ways = {self.sink: 1}
        for key in reversed(self.keys):
            if key != self.sink:
                ways[key] = sum(ways[reader] for reader, _ in self.readers[key])
        return ways.get(self.source, 0) if self.keys else 0


def _shares(readers: list[SlotKey], numbers: _Numbers) -> list[tuple[SlotKey, float]]:
    if len(readers) == 1:
        return [(readers[0], 1.0)]
    lengths = [numbers.of(key, "grad", "l2") for key in readers]
    whole = sum(lengths)
    return [
        (key, length / whole if whole else math.nan)
        for key, length in zip(readers, lengths, strict=True)
    ]


def _on_paths(
    graph: Structure, edges: Sequence[tuple[int, int, bool]], source: SlotKey, sink: SlotKey
) -> list[SlotKey]:
    """Return the tensors on any path from source to sink, in topological order."""
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for u, v, _ in edges:
        after.setdefault(u, []).append(v)
        before.setdefault(v, []).append(u)
    start, end = graph.keys.index(source), graph.keys.index(sink)
    inside = _reached(start, after) & _reached(end, before)
    if start == end or end not in inside:
        return []
    waiting = {key: len({u for u in before.get(key, []) if u in inside}) for key in inside}
    ready, ranked = [start], list[int]()
    while ready:
        ranked.append(ready.pop())
        for v in {v for v in after.get(ranked[-1], []) if v in inside}:
            waiting[v] -= 1
            if not waiting[v]:
                ready.append(v)
    return [graph.keys[i] for i in ranked]


def _reached(start: int, near: Mapping[int, Sequence[int]]) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for other in near.get(stack.pop(), ()):
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


def _rank(share: float) -> float:
    return -1.0 if math.isnan(share) else share


def _ratio(over: float, under: float) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(over) / np.float64(under))


def _name(key: SlotKey) -> str:
    """Return a short name: with the role unless it is "output", the iteration unless it is 0."""
    role = key.role.removeprefix("output") if key.role.startswith("output") else f".{key.role}"
    return f"{key.node}{role}" + (f" #{key.iteration}" if key.iteration else "")
