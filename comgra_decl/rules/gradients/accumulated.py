"""Gradients that accumulate across steps because they are never cleared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Early,
    Factor,
    Finding,
    Fraction,
    Mask,
    Measured,
    Patient,
    Previous,
    Scene,
    Share,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_FIRST = 3  # records whose median is the initial value


class AccumulatedParameters(Patient):
    """Options of `accumulated_gradient`."""

    growth: Factor = 3.0
    """Factor by which weight gradients may grow relative to gradients of the layers' outputs."""

    change: Fraction = 0.4
    """Largest relative change in a mean between records that is considered smooth."""

    share: Share = 0.7
    """Smallest share of weights that must meet the condition in the same record."""


class AccumulatedGradient(SlotRule):
    """Gradients that accumulate across steps because they are never cleared."""

    name = "accumulated_gradient"
    severity = "error"
    certainty = 0.75
    definition = (
        "The rule divides the l2 norm of each weight's gradient by the norm of the output gradient "
        "of its layer. This ratio has grown to `growth` times its median over the first "
        f"{_FIRST} records. In addition, the mean of the weight's gradient changes between "
        "records by less than `change` times its value, or its smallest and largest elements "
        "change by less than half as much. At least `share` of all weights meet both conditions, "
        "for `patience` records in a row. Such gradients are characteristic of a sum over all "
        "steps. In contrast, the gradient of a single batch is proportional to the output's "
        "gradient, and its mean is mostly noise. Large, steady gradients can look the same, so "
        "the rule reports nothing if gradients were found to be cleared before a backward pass "
        "in one of the first records."
    )
    source = "Our own derivation; TheDeepChecker lists a missing `zero_grad()` among common bugs."
    advice = "Call `optimizer.zero_grad()` once per optimizer step, before the backward pass."
    Parameters = AccumulatedParameters
    statistics = ("l2", "mean", "min", "max")
    evidence = "growth against the output's gradient"
    needs = (
        "gradients of outputs and parameters, {select: '**', capture: [output_grad, "
        "parameter_grad]}"
    )

    _early = per_run(Early, _FIRST)
    _previous = per_run(lambda: {name: Previous() for name in ("mean", "min", "max")})

    def wants(self, table: SlotTable) -> Mask:
        """Return gradients of weights whose layers also have recorded output gradients."""
        wanted = table.weight_gradients
        partner = _output_gradients(table)
        return wanted & table.where(lambda info: info.key.node in partner)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the ratio of the two gradients divided by its initial value."""
        others = window.table.remembered((_partners, len(at)), lambda t: _partners(t, at))
        ratio = window.read("l2", at) / window.read("l2", others)
        ratio = np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan).astype(np.float64)
        growth = ratio / self._early.look(at, ratio)
        change = {name: self._change(window, at, name) for name in self._previous}
        smooth = change["mean"] < self.parameters.change
        smooth |= np.maximum(change["min"], change["max"]) < self.parameters.change / 2
        summed = (growth > self.parameters.growth) & smooth
        many = summed.mean(1, keepdims=True) >= self.parameters.share
        return summed & many, growth

    def _change(self, window: Window, at: Slots, name: str) -> NDArray[np.float64]:
        """Return the relative change in a statistic since the previous record."""
        value = window.read(name, at).astype(np.float64)
        return np.asarray(np.abs(value - self._previous[name].look(at, value)) / np.abs(value))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return the finding, unless gradients were found to be cleared."""
        return [] if scene.are_cleared else super().findings(scene)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            "Gradients are never cleared: weight gradients accumulate across steps and have grown "
            f"{self.streak.worst[slot]:.3g}-fold relative to output gradients, for example "
            f"{scene.table.place(slot)}."
        )


def _partners(table: SlotTable, at: Slots) -> Slots:
    partner = _output_gradients(table)
    return np.array([partner[table.infos[slot].key.node] for slot in at.tolist()], np.int64)


def _output_gradients(table: SlotTable) -> dict[str, int]:
    return {
        info.key.node: info.id
        for info in table.infos
        if info.kind == "computed" and info.key.pass_ == "grad" and info.key.iteration == 0
    }
