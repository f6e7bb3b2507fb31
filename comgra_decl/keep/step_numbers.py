"""Give triggers access by name to the values of a few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import AGGREGATES, SlotInfo, SlotKey, StepBatch, StepInfo
from comgra_decl.spec.globs import matches

if TYPE_CHECKING:
    from comgra_decl.spec.keep import MeasureSpec

_MOST_LAYOUTS = 256
Columns = NDArray[np.intp]


class Names:
    """The slots seen so far, and the positions of requested ones in a batch."""

    def __init__(self) -> None:
        self.keys: dict[int, SlotKey] = {}
        self._found: dict[tuple[object, int], tuple[NDArray[np.int32], Columns]] = {}

    def add(self, slots: Sequence[SlotInfo]) -> None:
        """Add the names of new slots."""
        self.keys.update((slot.id, slot.key) for slot in slots)

    def columns(
        self, who: object, slots: NDArray[np.int32], wanted: Callable[[SlotKey], bool]
    ) -> Columns:
        """Return the positions in `slots` that `who` needs; cached per array."""
        key = (who, id(slots))
        found = self._found.get(key)
        if found is None or found[0] is not slots:
            if len(self._found) >= _MOST_LAYOUTS:
                self._found.clear()
            places = [i for i, slot in enumerate(slots.tolist()) if wanted(self.keys[slot])]
            found = self._found[key] = slots, np.array(places, np.intp)
        return found[1]


class StepNumbers:
    """`k` consecutive steps over the same slots.

    Attributes:
        batch: their statistics.
        statistics: names of the statistics, in order.
        kpis: KPIs of each step, by name.
        names: slots by name.
        watched: mask [k] of the steps that triggers check, which are the steps in train mode.
    """

    def __init__(
        self,
        batch: StepBatch,
        statistics: tuple[str, ...],
        names: Names,
        kpis: Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        self.batch, self.statistics, self.names = batch, statistics, names
        self.kpis = batch.kpis if kpis is None else kpis
        self.watched = np.array([info.mode == "train" for info in batch.steps], np.bool_)

    def statistic(self, name: str, over_batch: str) -> NDArray[np.float32]:
        """Return a statistic for all slots, [k, n]."""
        rank = AGGREGATES.index(over_batch)
        return self.batch.aggregates[:, :, self.statistics.index(name), rank]

    def by_type(self) -> dict[str, NDArray[np.intp]]:
        """Return the steps to check, by type of execution."""
        found: dict[str, list[int]] = {}
        for i, info in enumerate(self.batch.steps):
            if self.watched[i]:
                found.setdefault(info.type, []).append(i)
        return {name: np.array(steps, np.intp) for name, steps in found.items()}


class Measure:
    """Reads the value that a trigger checks.

    Args:
        spec: spec of the value.
        lowest: whether to use the smallest value of several slots instead of the largest.
    """

    def __init__(self, spec: MeasureSpec, *, lowest: bool = False) -> None:
        self._spec = spec
        self._extreme = np.fmin if lowest else np.fmax
        self.found = False
        """Whether the value has ever been recorded."""

    def __str__(self) -> str:
        spec = self._spec
        if spec.kpi is not None:
            return spec.kpi
        return f"{spec.statistic} of {spec.node} ({spec.pass_})"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics read."""
        return ("mean",) if self._spec.kpi is not None else (self._spec.statistic,)

    def read(self, look: StepNumbers) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the values [k], and a mask of the steps that have a value."""
        values, there = self._kpi(look) if self._spec.kpi is not None else self._extremes(look)
        self.found = self.found or bool(there.any())
        return values, there

    def _kpi(self, look: StepNumbers) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        name = self._spec.kpi
        assert name is not None
        values = np.array([kpis.get(name, np.nan) for kpis in look.kpis], np.float64)
        there = np.array([name in kpis for kpis in look.kpis], np.bool_)
        if name == "loss" and not there.all():
            at = look.names.columns(self, look.batch.slots, _is_loss)[:1]
            if len(at):
                recorded = look.statistic("mean", "mean")[:, at[0]]
                values, there = np.where(there, values, recorded), np.ones_like(there)
        return values, there

    def _extremes(self, look: StepNumbers) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        columns = look.names.columns(self, look.batch.slots, self._wants)
        if not len(columns):
            nothing = np.full(len(look.batch.steps), np.nan)
            return nothing, np.zeros(len(nothing), np.bool_)
        table = look.statistic(self._spec.statistic, self._spec.over_batch)[:, columns]
        values = self._extreme.reduce(table, axis=1).astype(np.float64)
        return values, ~np.isnan(values)

    def _wants(self, key: SlotKey) -> bool:
        spec = self._spec
        assert spec.node is not None
        return (
            matches(spec.node, key.node)
            and _fits(spec.role, key.role)
            and _fits(spec.pass_, key.pass_)
        )


def _is_loss(key: SlotKey) -> bool:
    return key.node == "loss" and key.pass_ == "forward"


def _fits(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


class StepView:
    """One step as passed to a custom function; valid only while that function runs.

    Attributes:
        step: number of the step.
        type: its type of execution.
        batch_size: number of samples in the batch; None if unknown.
        kpis: KPIs by name, such as "loss".
    """

    __slots__ = ("_i", "_info", "_look", "kpis")

    def __init__(self, look: StepNumbers, i: int, kpis: Mapping[str, float]) -> None:
        self._look, self._i = look, i
        self._info: StepInfo = look.batch.steps[i]
        self.kpis = kpis

    @property
    def step(self) -> int:
        """Number of the step."""
        return self._info.step

    @property
    def type(self) -> str:
        """Type of execution of the step."""
        return self._info.type

    @property
    def batch_size(self) -> int | None:
        """Number of samples in the batch; None if unknown."""
        return self._info.batch_size

    def lookup(
        self,
        node: str,
        statistic: str = "mean",
        *,
        role: str = "output",
        pass_: str = "forward",
        iteration: int = 0,
        over_batch: str = "mean",
    ) -> float:
        """Return a statistic of one slot; NaN if it was not recorded in this step.

        Raises:
            ValueError: the statistic is not listed in the spec's `stats`.
        """
        if statistic not in self._look.statistics:
            raise ValueError(f"{statistic!r} is not one of {', '.join(self._look.statistics)}")
        key = SlotKey(node, role, iteration, pass_)
        batch = self._look.batch
        at = self._look.names.columns(key, batch.slots, lambda other: other == key)
        if not len(at):
            return float("nan")
        return float(self._look.statistic(statistic, over_batch)[self._i, at[0]])
