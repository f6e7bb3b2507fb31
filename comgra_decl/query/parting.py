"""Find where two runs diverge: the first step and tensor that differ beyond rounding error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import AGGREGATES, PROBE_MODE, SlotInfo, SlotKey, Structure

from .compare import differences
from .run import Run

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Relative differences that count as rounding error, by dtype.

These are several units in the last place, because summing in a different order can change more than
one. The value for bfloat16 also applies to all other floats.
"""

SIZES = ("mean", "std", "abs_mean", "abs_max", "min", "max", "rms", "l2")
"""Statistics that are compared, relative to the size of the tensor. Counts, such as the share of
zeros, may change through rounding."""

_COMPUTED = ("forward", "no_grad")
"""Passes whose values are compared."""

_AT_ONCE = 64  # records read together
_Numbers = NDArray[np.float64]

_MOST = 50  # differing tensors that are listed


class Difference(NamedTuple):
    """A tensor that differs.

    Attributes:
        node, role, iteration, pass_: the tensor, as named in the first run.
        step: the step.
        what: what differs most: the name of a statistic, "values" or "shape".
        here, there: the two numbers (of the element that differs most, for values); shapes as text.
        relative: the difference divided by the larger of the two tensors' maximum magnitudes.
        tolerance: relative differences up to this count as rounding error.
    """

    node: str
    role: str
    iteration: int
    pass_: str
    step: int
    what: str
    here: Any
    there: Any
    relative: float
    tolerance: float

    @property
    def name(self) -> str:
        """The tensor as text: node, role and, if they are unusual, iteration and pass."""
        parts = [self.node, self.role]
        parts += [f"iteration {self.iteration}"] * (self.iteration > 0)
        parts += [self.pass_] * (self.pass_ != "forward")
        return ", ".join(parts)

    @property
    def numbers(self) -> str:
        """The two numbers and their difference as text."""
        if self.what == "shape":
            return f"shape {self.here} and {self.there}"
        far = (
            f"{self.relative:.2g} of the tensor's size"
            if math.isfinite(self.relative)
            else ("one of them is not finite")
        )
        what = "a value" if self.what == "values" else self.what
        return f"{what} {self.here:.7g} and {self.there:.7g} ({far})"


@dataclass(frozen=True)
class Parting:
    """Where two runs diverge.

    Attributes:
        first: the first difference, in the order of execution; None if there is none.
        same_until: the last compared step before it; None if the first compared step differs.
        differences: what else differs at that step, in the order of execution (up to 50).
        steps: the compared steps, which both runs recorded, up to the first difference [k].
        drift: the largest relative difference of any tensor at each of these steps [k].
        compared: number of tensors that were compared.
        only_here, only_there: nodes that only one of the runs has.
        settings: the settings that differ, see `comgra_decl.query.differences`.
    """

    first: Difference | None
    same_until: int | None
    differences: tuple[Difference, ...]
    steps: NDArray[np.int64]
    drift: NDArray[np.float64]
    compared: int
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    settings: pd.DataFrame = field(repr=False)

    @property
    def gradual(self) -> bool:
        """Whether the difference grew out of rounding errors rather than appearing suddenly.

        True if the runs already differed within the tolerance at an earlier step, by at least a
        tenth of it.
        """
        if self.first is None or len(self.drift) < 2:
            return False
        return bool(np.max(self.drift[:-1]) > self.first.tolerance / 10)

    @property
    def table(self) -> pd.DataFrame:
        """The differences at the first differing step, one row per tensor."""
        table = pd.DataFrame(self.differences, columns=list(Difference._fields))
        return table.rename(columns={"pass_": "pass"})


def part(
    here: Run,
    there: Run,
    *,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    type: str | None = None,
) -> Parting:
    """Return the first step and tensor, in the order of execution, at which two runs differ.

    Tensors are matched by name, and records by step. All statistics in `SIZES` that both runs have
    are compared, and at the first differing step also the values that both runs kept, because
    a transposed or reordered tensor has the same statistics. A parameter comes before the first
    tensor that is computed from it; gradients come after the forward pass, in the order in which
    they were computed, and updates last.

    Runs on different devices or with different numbers of threads sum in different orders. A
    difference therefore counts only if it exceeds a tolerance relative to the largest magnitude of
    the tensor. Training amplifies rounding errors; see `Parting.gradual`.

    Args:
        here: a run, such as one of a port.
        there: the run to compare with, such as one of the reference implementation.
        names: other names of nodes in `there`, by their names in `here`. Each name also applies to
            the modules inside, so `{"encoder": "model.enc"}` matches `encoder.0` with
            `model.enc.0`.
        tolerance: relative differences up to this count as rounding error; None: `TOLERANCES`.
        type: type of execution; None: training.

    Raises:
        UnknownNameError: the runs have no step or no tensor in common.
    """
    pair = _Pair(here, there, names=names or {}, tolerance=tolerance)
    records = pair.records(type)
    steps = records.index.to_numpy(np.int64)
    drift: list[float] = []
    found: list[Difference] = []
    for step, one, other in pair.rows(records):
        differences_, largest = pair.compared(step, one, other)
        drift.append(largest)
        if differences_:
            found = differences_
            break
    last = len(drift) - 1
    for at in dict.fromkeys([last] if found else [0, last]):
        found += pair.by_values(int(steps[at]), records.iloc[at].tolist(), found)
        if found:
            last = at
            break
    found.sort(key=pair.order)
    nodes, others = set(there.nodes), {node: pair.other(node) for node in here.nodes}
    paired = set(others.values())
    return Parting(
        first=found[0] if found else None,
        same_until=int(steps[last - 1]) if found and last > 0 else None,
        differences=tuple(found[:_MOST]),
        steps=steps[: last + 1],
        drift=np.array(drift[: last + 1]),
        compared=len(pair.matches),
        only_here=tuple(node for node, other in others.items() if other not in nodes),
        only_there=tuple(node for node in there.nodes if node not in paired),
        settings=differences([here, there]),
    )


def sentences(found: Parting) -> list[str]:
    """Return sentences that say where two runs diverge."""
    steps, first = found.steps, found.first
    if first is None:
        where = f"{found.compared} tensors at {len(steps)} steps, {steps[0]} to {steps[-1]}"
        largest = f"The largest relative difference is {found.drift.max():.2g}."
        return [f"The runs do not differ by more than rounding error in {where}. {largest}"]
    lines = [f"The runs diverge at step {first.step}, at {first.name}: {first.numbers}."]
    if found.same_until is None:
        lines.append("It is the first step that both runs recorded.")
    else:
        lines.append(f"Up to step {found.same_until}, they differ by no more than rounding error.")
    if found.gradual:
        lines.append(
            f"The difference grew gradually, from {found.drift[0]:.2g} to {first.relative:.2g}: "
            "training may merely have amplified rounding errors."
        )
    return lines


class _Pair:
    """Two runs and their common tensors."""

    def __init__(
        self, here: Run, there: Run, *, names: Mapping[str, str], tolerance: float | None
    ) -> None:
        self._runs = here, there
        self._names, self._tolerance = names, tolerance
        self.matches = self._matched()
        if not self.matches:
            raise UnknownNameError(
                "the runs have no tensor in common. If a port names its modules differently, pass "
                "the matching names: names={'encoder': 'model.enc'}."
            )
        self._ids = [
            np.array([match[side].id for match in self.matches], np.int64) for side in (0, 1)
        ]
        shared = set(here.statistics) & set(there.statistics)
        self._statistics = [name for name in SIZES if name in shared]
        if not self._statistics:
            raise UnknownNameError(
                f"the runs have none of the compared statistics in common: {', '.join(SIZES)}."
            )
        self._ranks = _execution(here.arrays.slots, here.structure())
        self._tolerances = np.array([self._tolerance_of(*match) for match in self.matches])

    def other(self, node: str) -> str:
        """Return the name that a node of the first run has in the second one."""
        for name in (node, *_parents(node)):
            if name in self._names:
                return self._names[name] + node[len(name) :]
        return node

    def order(self, difference: Difference) -> tuple[float, ...]:
        """Sort key: the order of execution."""
        return self._ranks[SlotKey(*difference[:4])]

    def records(self, type_: str | None) -> pd.DataFrame:
        """Return the record numbers ("here", "there") of the common steps, by step."""
        sides = [_records(run, type_) for run in self._runs]
        found = pd.concat(sides, axis=1, keys=("here", "there"), join="inner").sort_index()
        if not len(found):
            raise UnknownNameError("the runs have no recorded step in common.")
        return found

    def rows(self, records: pd.DataFrame) -> Iterator[tuple[int, _Numbers, _Numbers]]:
        """Yield each step with the statistics of all common tensors [tensors, names + 1, 3].

        The last one is "nonfinite", which is missing only where the tensor was not recorded.
        """
        names = [*self._statistics, "nonfinite"]
        for start in range(0, len(records), _AT_ONCE):
            now = records.iloc[start : start + _AT_ONCE]
            sides = [
                run.arrays.aggregates(now[side].to_numpy(np.int64), ids, names)
                for run, ids, side in zip(self._runs, self._ids, ("here", "there"), strict=True)
            ]
            yield from zip(map(int, now.index), *sides, strict=True)

    def compared(
        self, step: int, here: _Numbers, there: _Numbers
    ) -> tuple[list[Difference], float]:
        """Return the tensors whose statistics differ, and the largest relative difference."""
        absent = np.isnan(here[:, -1, 0]) | np.isnan(there[:, -1, 0])
        here, there = here[:, :-1], there[:, :-1]
        relative = self._relative(here, there).reshape(len(here), -1)
        relative[absent] = 0
        largest = relative.max(axis=1)
        found = []
        for tensor in np.flatnonzero(largest > self._tolerances).tolist():
            each = relative[tensor].reshape(-1, len(AGGREGATES))
            if each[:, 0].max() > self._tolerances[tensor]:  # means over the batch are clearest
                each[:, 1:] = 0
            name, over = divmod(int(each.argmax()), len(AGGREGATES))
            what = self._statistics[name]
            what += f" ({AGGREGATES[over]} over the batch)" if over else ""
            place = tensor, name, over
            found.append(
                Difference(
                    *self.matches[tensor][0].key, step, what, float(here[place]),
                    float(there[place]), float(each.max()), float(self._tolerances[tensor]),
                )
            )  # fmt: skip
        return found, float(largest.max(initial=0.0))

    def _relative(self, here: _Numbers, there: _Numbers) -> _Numbers:
        """Return the relative differences [tensors, names, 3]; infinite where one is not finite."""
        size = np.fmax(self._sizes(here), self._sizes(there))[:, None, None]
        size = np.broadcast_to(size, here.shape).copy()
        if "l2" in self._statistics:  # it grows with the number of elements
            place = self._statistics.index("l2")
            size[:, place] = np.fmax(np.abs(here[:, place]), np.abs(there[:, place]))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            relative = np.abs(here - there) / size
        relative[(here == there) | (np.isnan(here) & np.isnan(there))] = 0
        relative[np.isnan(relative)] = math.inf
        return relative

    def by_values(
        self, step: int, records: Sequence[int], known: Sequence[Difference]
    ) -> list[Difference]:
        """Return the tensors whose kept values or shapes differ at a step.

        Leaves out `known` differences, and parameters if the tensors computed from them agree,
        because a port may store a weight transposed.
        """
        there = {SlotKey(*difference[:4]) for difference in known}
        found: dict[SlotKey, Difference] = {}
        kept = [run.values_of(int(n)) for run, n in zip(self._runs, records, strict=True)]
        for (one, other), tolerance in zip(self.matches, self._tolerances.tolist(), strict=True):
            if one.key in there or one.id not in kept[0] or other.id not in kept[1]:
                continue
            worst = _worst(kept[0][one.id], kept[1][other.id])
            if worst is not None and worst.relative > tolerance:
                found[one.key] = Difference(*one.key, step, *worst, tolerance)
        computed = {
            one.key
            for one, _ in self.matches
            if one.kind != "parameter" and one.key.pass_ in _COMPUTED
        }
        wrong = {key.node for key in there | found.keys() if key in computed}
        agreeing = {key.node for key in computed} - wrong
        parameters = {one.key for one, _ in self.matches if one.kind == "parameter"}
        return [
            difference
            for key, difference in found.items()
            if key not in parameters or key.node not in agreeing
        ]

    def _matched(self) -> list[tuple[SlotInfo, SlotInfo]]:
        here, there = (run.arrays.slots for run in self._runs)
        by_key = {slot.key: slot for slot in there}
        pairs = (
            (slot, by_key.get(slot.key._replace(node=self.other(slot.key.node)))) for slot in here
        )
        return [(one, other) for one, other in pairs if other is not None]

    def _tolerance_of(self, here: SlotInfo, there: SlotInfo) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return max(_rounding(slot.dtype) for slot in (here, there))

    def _sizes(self, rows: _Numbers) -> NDArray[np.float64]:
        """Return the largest magnitude of each tensor [tensors]."""
        best = ("abs_max", "max", "l2", "rms", "std", "abs_mean", "mean", "min")
        name = next(n for n in best if n in self._statistics)
        return np.abs(rows[:, self._statistics.index(name), AGGREGATES.index("abs_max")])


def _records(run: Run, type_: str | None) -> pd.Series[Any]:
    """Return the number of the last record of each step; None: training."""
    table = run.records
    chosen = table["mode"] == "train" if type_ is None else table["type"] == type_
    if type_ is None and not chosen.any():
        chosen = table["mode"] != PROBE_MODE
    if type_ is None and not chosen.any():
        chosen[:] = True
    numbers = pd.Series(table.index[chosen].to_numpy(np.int64), index=table["step"][chosen])
    return numbers[~numbers.index.duplicated(keep="last")]


class _Worst(NamedTuple):
    """What differs most between two tensors, as in `Difference`."""

    what: str
    here: Any
    there: Any
    relative: float


def _worst(here: NDArray[Any], there: NDArray[Any]) -> _Worst | None:
    """Return the two elements that differ most, or the shapes; None for empty tensors."""
    if here.shape != there.shape:
        return _Worst("shape", str(here.shape), str(there.shape), math.inf)
    if not here.size:
        return None
    kind = np.complex128 if np.iscomplexobj(here) or np.iscomplexobj(there) else np.float64
    a, b = here.astype(kind), there.astype(kind)
    with np.errstate(invalid="ignore"):
        far = np.abs(a - b)
    far[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    far[np.isnan(far)] = math.inf
    place = np.unravel_index(int(far.argmax()), far.shape)
    sizes = np.concatenate([np.abs(a[np.isfinite(a)]), np.abs(b[np.isfinite(b)])])
    size = float(sizes.max(initial=0.0))
    relative = float(far[place]) / size if size else math.inf
    return _Worst("values", _plain(a[place]), _plain(b[place]), relative if far[place] else 0.0)


def _plain(value: Any) -> float:
    return float(abs(value)) if isinstance(value, complex) else float(value)


def _rounding(dtype: str) -> float:
    if dtype.startswith(("int", "uint", "bool")):
        return 0.0
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


def _parents(node: str) -> Iterator[str]:
    while "." in node:
        node = node.rpartition(".")[0]
        yield node


def _execution(
    slots: Sequence[SlotInfo], graph: Structure | None
) -> dict[SlotKey, tuple[float, ...]]:
    """Return the sort key of each slot in the order of execution.

    Within the forward pass, tensors follow the graph: those that do not depend on each other come
    in the order of their first appearance. A parameter comes right before its first consumer.
    """
    places = {} if graph is None else _sorted_keys(graph)
    found: dict[SlotKey, tuple[float, ...]] = {}
    for slot in slots:
        key = slot.key
        forward = key.pass_ in _COMPUTED
        order = 0.0 if forward else 2.0 if key.pass_ == "update" else 1.0
        place = places.get(key._replace(pass_="forward"), float(len(places))) if forward else 0.0
        found[key] = order, place, float(slot.id)
    return found


def _sorted_keys(graph: Structure) -> dict[SlotKey, float]:
    """Return the place of each key of a graph in the order of execution."""
    after: list[list[int]] = [[] for _ in graph.keys]
    before = [0] * len(graph.keys)
    for source, sink, _ in graph.edges:
        if source != sink:
            after[source].append(sink)
            before[sink] += 1
    places: dict[SlotKey, float] = {}
    free = [i for i, count in enumerate(before) if not count]
    heads = set(free)  # inputs and parameters wait for their first consumer
    place = 0
    while free:
        free.sort()
        now = free.pop(0)
        if now not in heads:
            place += 1
            places[graph.keys[now]] = float(place)
        for sink in after[now]:
            before[sink] -= 1
            if not before[sink]:
                free.append(sink)
    for head in heads:
        consumers = [places[graph.keys[s]] for s in after[head] if graph.keys[s] in places]
        places[graph.keys[head]] = min(consumers, default=0.0) - 0.5
    return places
