"""Updates that are too large or too small for their parameters."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.rules.base import Patient, Scene, SlotRule
from comgra_decl.rules.memory import Bools, Previous, Slots
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Window
from comgra_decl.spec.base import Int, Number


class LargeParameters(Patient):
    """What can be said of `large_update`."""

    patience: Annotated[Int, Field(ge=1)] = 3
    """For so many records in a row it must be so."""

    ratio: Annotated[Number, Field(gt=0)] = 0.2
    """An update is too large above this share of its parameter."""


class LargeUpdate(SlotRule):
    """Updates that are too large for their weights."""

    name = "large_update"
    certainty = 0.65
    definition = (
        "The l2 norm of the update of a weight is more than `ratio` times that of the weight, for "
        "`patience` records. Where updates are not recorded, the change of its own l2 norm "
        "between records of consecutive steps, which is never more, stands for it."
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

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._before, self._step = Previous(), Previous()

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights; biases begin at zero."""
        return table.parameters & table.where(lambda info: len(info.shape) > 1)

    def measure(self, window: Window, at: Slots) -> tuple[Bools, NDArray[Any]]:
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
        return (ratio > self.parameters.ratio) & np.isfinite(ratio), ratio

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how large it is."""
        return (
            f"{scene.table.place(slot)} changes by {self.streak.worst[slot]:.0%} of itself in one "
            f"step (step {self.streak.worst_step[slot]}); about 0.1 % is usual."
        )


class SmallParameters(Patient):
    """What can be said of `small_update`."""

    patience: Annotated[Int, Field(ge=1)] = 10
    """For so many records in a row it must be so."""

    ratio: Annotated[Number, Field(gt=0)] = 1e-6
    """An update is too small below this share of its parameter."""


class SmallUpdate(SlotRule):
    """Updates that are too small to change anything."""

    name = "small_update"
    certainty = 0.6
    definition = (
        "The l2 norm of the update of a weight is less than `ratio` times that of the weight for "
        "`patience` records, in at least half of all weights."
    )
    source = "TheDeepChecker warns below 1e-4 of the mean; float32 itself ends at 6e-8."
    advice = "Raise the learning rate, or see why gradients are that small."
    explained_by = ("vanishing_gradient", "untrained_parameter")
    Parameters = SmallParameters
    statistics = ("l2",)
    lowest, evidence = True, "update / weight"
    needs = "parameters and their updates, {select: '**', capture: [parameter, update]}"

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights whose updates are recorded."""
        weights = np.flatnonzero(table.parameters & table.where(lambda info: len(info.shape) > 1))
        mask = np.zeros(len(table), np.bool_)
        mask[weights[_updates(table, weights) >= 0]] = True
        return mask

    def measure(self, window: Window, at: Slots) -> tuple[Bools, NDArray[Any]]:
        """Divides the update by the weight."""
        ratio = window.read("l2", _updates(window.table, at)) / window.read("l2", at)
        small = ratio < self.parameters.ratio
        return small & (small.mean(1, keepdims=True) >= 0.5), ratio

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how small it is."""
        return (
            f"Weights hardly move: {scene.table.place(slot)} changes by "
            f"{self.streak.worst[slot]:.1e} of itself per step."
        )


def _updates(table: SlotTable, at: Slots) -> Slots:
    """Returns the slot of each parameter's update, -1 where it is not recorded."""
    keys = [table.infos[slot].key for slot in at.tolist()]
    return np.array([table.by_key.get(k._replace(pass_="update"), -1) for k in keys], np.int64)
