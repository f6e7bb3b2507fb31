"""Updates that are too large or too small for their parameters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Bools,
    Count,
    Mask,
    Measured,
    Patient,
    Positive,
    Previous,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    grown,
    per_run,
)

_TINY = 1e-3  # a root mean square below which a weight counts as having begun at zero
_FIRST = 15  # so many first records of such weights are left alone


class LargeParameters(Patient):
    """What can be said of `large_update`."""

    patience: Count = 3
    """For so many records in a row it must be so."""

    ratio: Positive = 0.2
    """An update is too large above this share of its parameter."""


class LargeUpdate(SlotRule):
    """Updates that are too large for their weights."""

    name = "large_update"
    certainty = 0.65
    definition = (
        "The l2 norm of the update of a weight is more than `ratio` times that of the weight, for "
        "`patience` records. Where updates are not recorded, the change of its own l2 norm "
        "between records of consecutive steps, which is never more, stands for it. Weights that "
        "begin near zero (root mean square below 1e-3) are left out in the first 15 records."
    )
    source = (
        "About 1e-3 is healthy (Karpathy, CS231n notes); TheDeepChecker warns above 1e-1. Adam's "
        "first steps at usual rates come to 3e-2."
    )
    advice = "Lower the learning rate, ten times for a start, or warm it up; clip gradients."
    explained_by = ("nonfinite", "accumulated_gradient")
    Parameters = LargeParameters
    statistics = ("l2",)
    evidence = "update / weight"
    needs = "parameters, {select: '**', capture: [parameter, update]}"

    _before = per_run(Previous)
    _step = per_run(Previous)
    _size = np.zeros(0)  # of each weight, when it was first seen

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights; biases begin at zero."""
        return table.parameters & table.where(lambda info: len(info.shape) > 1)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Divides the update, or what is known of it, by the weight."""
        weight = window.read("l2", at).astype(np.float64)
        updates = window.table.remembered((LargeUpdate, len(at)), lambda t: _updates(t, at))
        steps = np.broadcast_to(window.steps[:, None], weight.shape).astype(np.float64)
        steps = np.where(np.isnan(weight), np.nan, steps)
        next_to = steps - self._step.look(at, steps) == 1
        before = self._before.look(at, weight)
        ratio = np.where(next_to, np.abs(weight - before) / before, np.nan)
        known = window.read("l2", np.maximum(updates, 0)) / weight
        ratio = np.where(updates >= 0, known, ratio)
        ratio = np.where(self._fresh(window, at, weight), np.nan, ratio)
        return (ratio > self.parameters.ratio) & np.isfinite(ratio), ratio

    def _fresh(self, window: Window, at: Slots, weight: NDArray[np.float64]) -> Bools:
        """Returns the first records of weights that begin near zero: all is large beside that."""
        self._size = grown(self._size, int(at.max(initial=-1)) + 1, np.nan)
        there = ~np.isnan(weight)
        size = weight / np.sqrt(window.elements(at))
        first = size[there.argmax(0), np.arange(len(at))]
        self._size[at] = np.where(np.isnan(self._size[at]), first, self._size[at])
        early = window.first + np.arange(len(window)) < _FIRST
        return np.asarray(early[:, None] & (self._size[at] < _TINY))

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how large it is."""
        return (
            f"{scene.table.place(slot)} changes by {self.streak.worst[slot]:.0%} of itself in one "
            f"step (step {self.streak.worst_step[slot]}); about 0.1 % is usual."
        )


class SmallParameters(Patient):
    """What can be said of `small_update`."""

    patience: Count = 10
    """For so many records in a row it must be so."""

    ratio: Positive = 1e-6
    """An update is too small below this share of its parameter."""


class SmallUpdate(SlotRule):
    """Updates that are too small to change anything."""

    name = "small_update"
    certainty = 0.6
    definition = (
        "The l2 norm of the update of a weight is less than `ratio` times that of the weight for "
        "`patience` records, in at least half of all weights that have gradients. Where updates "
        "are not recorded, the largest relative change of its l2 norm, its smallest and its "
        "largest element between records, by the steps between them, stands for it."
    )
    source = "TheDeepChecker warns below 1e-4 of the mean; float32 itself ends at 6e-8."
    advice = "Raise the learning rate, or see why gradients are that small."
    explained_by = ("vanishing_gradient", "untrained_parameter", "gradient_scale")
    Parameters = SmallParameters
    statistics = ("l2",)
    lowest, evidence = True, "update / weight"
    needs = "parameters and their gradients, {select: '**', capture: [parameter, parameter_grad]}"

    _step = per_run(Previous)
    _before = per_run(lambda: {name: Previous() for name in ("l2", "min", "max")})

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights that have gradients, or updates that are recorded."""
        weights = np.flatnonzero(table.parameters & table.where(lambda info: len(info.shape) > 1))
        mask = np.zeros(len(table), np.bool_)
        mask[weights[(_updates(table, weights) >= 0) | (_others(table, weights, "grad") >= 0)]] = 1
        return mask

    def measure(self, window: Window, at: Slots) -> Measured:
        """Divides the update by the weight."""
        updates = _updates(window.table, at)
        known = window.read("l2", np.maximum(updates, 0)) / window.read("l2", at)
        ratio = np.where(updates >= 0, known, self._changes(window, at))
        small = ratio < self.parameters.ratio
        return small & (small.mean(1, keepdims=True) >= 0.5), ratio

    def _changes(self, window: Window, at: Slots) -> NDArray[np.float64]:
        """Returns the largest relative change per step of what tells a weight."""
        weight = window.read("l2", at).astype(np.float64)
        steps = np.broadcast_to(window.steps[:, None], weight.shape).astype(np.float64)
        steps = np.where(np.isnan(weight), np.nan, steps)
        apart = steps - self._step.look(at, steps)
        largest = np.full(weight.shape, np.nan)
        for name in (name for name in self._before if window.has(name)):
            value = window.read(name, at).astype(np.float64)
            change = np.abs(value - self._before[name].look(at, value)) / np.abs(value)
            largest = np.fmax(largest, change / apart)
        return largest

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how small it is."""
        return (
            f"Weights hardly move: {scene.table.place(slot)} changes by "
            f"{self.streak.worst[slot]:.1e} of itself per step."
        )


def _updates(table: SlotTable, at: Slots) -> Slots:
    """Returns the slot of each parameter's update, -1 where it is not recorded."""
    return _others(table, at, "update")


def _others(table: SlotTable, at: Slots, pass_: str) -> Slots:
    keys = [table.infos[slot].key for slot in at.tolist()]
    return np.array([table.by_key.get(k._replace(pass_=pass_), -1) for k in keys], np.int64)
