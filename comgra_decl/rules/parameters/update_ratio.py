"""Updates that are too large or too small for their weights."""

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
    lower_rate,
    per_run,
    raise_rate,
    usual_norm,
)

_TINY = 1e-3  # weights with a smaller root mean square are treated as initialized to zero
_FIRST = 15  # number of records in which such weights are ignored


class LargeParameters(Patient):
    """Options of `large_update`."""

    patience: Count = 3

    ratio: Positive = 0.2
    """Largest allowed norm of an update, relative to the norm of the weight."""


class LargeUpdate(SlotRule):
    """Updates that are too large for their weights."""

    name = "large_update"
    certainty = 0.65
    definition = (
        "For `patience` records in a row, the l2 norm of a weight's update exceeds `ratio` times "
        "the norm of the weight. If the weight is smaller than PyTorch's default initialization "
        "would make it, the norm after default initialization is used instead. If updates are "
        "not recorded, the rule uses the change in the weight's norm between records of "
        "consecutive steps, which cannot be larger than the norm of the update. Weights that "
        f"start near zero (root mean square below {_TINY:g}) are ignored in the first {_FIRST} "
        "records, and so are frozen weights, in whose place a program may pass others."
    )
    source = (
        "A ratio of about 1e-3 is healthy (Karpathy, CS231n notes). TheDeepChecker warns above "
        "1e-1. Adam's first steps reach 3e-2 with common learning rates."
    )
    advice = (
        "Lower the learning rate (start by dividing it by ten), use a warmup, or clip gradients."
    )
    explained_by = (
        "nonfinite",
        "accumulated_gradient",
        "summed_loss",
    )
    Parameters = LargeParameters
    statistics = ("l2",)
    evidence = "update / weight"
    needs = "parameters, {select: '**', capture: [parameter, update]}"

    _before = per_run(Previous)
    _step = per_run(Previous)
    _size = np.zeros(0)  # root mean square of each weight in its first record

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        return lower_rate(scene, self.advice)

    def wants(self, table: SlotTable) -> Mask:
        """Return the weights; biases are excluded because they start at zero."""
        return table.weights

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the update, or the change in the norm, divided by the weight's norm."""
        weight = window.read("l2", at).astype(np.float64)
        updates = window.table.remembered((LargeUpdate, len(at)), lambda t: _updates(t, at))
        steps = np.broadcast_to(window.steps[:, None], weight.shape).astype(np.float64)
        steps = np.where(np.isnan(weight), np.nan, steps)
        successive = steps - self._step.look(at, steps) == 1
        before = self._before.look(at, weight)
        usual = window.of_shape(usual_norm, at)
        ratio = np.where(successive, np.abs(weight - before) / np.fmax(before, usual), np.nan)
        known = window.read("l2", np.maximum(updates, 0)) / np.fmax(weight, usual)
        ratio = np.where(updates >= 0, known, ratio)
        ratio = np.where(self._fresh(window, at, weight), np.nan, ratio)
        return (ratio > self.parameters.ratio) & np.isfinite(ratio), ratio

    def _fresh(self, window: Window, at: Slots, weight: NDArray[np.float64]) -> Bools:
        """Return where weights that started near zero are in their first records."""
        self._size = grown(self._size, int(at.max(initial=-1)) + 1, np.nan)
        present = ~np.isnan(weight)
        size = weight / np.sqrt(window.elements(at))
        first = size[present.argmax(0), np.arange(len(at))]
        self._size[at] = np.where(np.isnan(self._size[at]), first, self._size[at])
        early = window.first + np.arange(len(window)) < _FIRST
        return np.asarray(early[:, None] & (self._size[at] < _TINY))

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out frozen weights, for which `functional_call` may pass generated ones."""
        infos, facts = scene.table.infos, scene.parameters
        keys = [(infos[slot].key.node, infos[slot].key.role) for slot in fired.tolist()]
        frozen = [facts.get(key, {}).get("trainable", True) is False for key in keys]
        return fired[~np.array(frozen, np.bool_)]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} changes by {self.streak.worst[slot]:.0%} of its norm in "
            f"step {self.streak.worst_step[slot]}; about 0.1% is common."
        )


class SmallParameters(Patient):
    """Options of `small_update`."""

    patience: Count = 10

    ratio: Positive = 1e-6
    """Smallest allowed norm of an update, relative to the norm of the weight."""


class SmallUpdate(SlotRule):
    """Updates that are too small to have an effect."""

    name = "small_update"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the l2 norm of a weight's update is below `ratio` times "
        "the norm of the weight. Updates of zero, as for frozen weights, are ignored. This must "
        "hold "
        "for at least half of all weights that have gradients. If updates are not recorded, the "
        "rule instead computes the relative change per step of the weight's l2 norm, smallest "
        "element and largest element, and uses the largest of the three."
    )
    source = (
        "TheDeepChecker warns if the ratio of the means is below 1e-4; the relative precision of "
        "float32 is 6e-8."
    )
    advice = "Raise the learning rate, or find out why the gradients are so small."
    explained_by = (
        "vanishing_gradient",
        "untrained_parameter",
        "gradient_scale",
        "lost_updates",
        "cleared_gradient",
    )
    Parameters = SmallParameters
    of_state = True
    statistics = ("l2",)
    lowest, evidence = True, "update / weight"
    needs = "parameters and their gradients, {select: '**', capture: [parameter, parameter_grad]}"

    _step = per_run(Previous)
    _before = per_run(lambda: {name: Previous() for name in ("l2", "min", "max")})

    def advise(self, scene: Scene) -> str:
        """Return advice adapted to the optimizer settings."""
        return raise_rate(scene, self.advice)

    def wants(self, table: SlotTable) -> Mask:
        """Return the weights that have gradients or recorded updates."""
        weights = np.flatnonzero(table.weights)
        mask = np.zeros(len(table), np.bool_)
        mask[weights[(_updates(table, weights) >= 0) | (_others(table, weights, "grad") >= 0)]] = 1
        return mask

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the norm of the update divided by the norm of the weight."""
        updates = _updates(window.table, at)
        known = window.read("l2", np.maximum(updates, 0)) / window.read("l2", at)
        ratio = np.where(updates >= 0, known, self._changes(window, at))
        small = (ratio < self.parameters.ratio) & (ratio > 0)
        return small & (small.mean(1, keepdims=True) >= 0.5), ratio

    def _changes(self, window: Window, at: Slots) -> NDArray[np.float64]:
        """Return the largest relative change per step of a weight's recorded statistics."""
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
        """Return the message for a slot."""
        return (
            f"Weights barely change: {scene.table.place(slot)} changes by "
            f"{self.streak.worst[slot]:.1e} of its norm per step."
        )


def _updates(table: SlotTable, at: Slots) -> Slots:
    """Return the slot of each parameter's update; -1 if it is not recorded."""
    return _others(table, at, "update")


def _others(table: SlotTable, at: Slots, pass_: str) -> Slots:
    keys = [table.infos[slot].key for slot in at.tolist()]
    return np.array([table.by_key.get(k._replace(pass_=pass_), -1) for k in keys], np.int64)
