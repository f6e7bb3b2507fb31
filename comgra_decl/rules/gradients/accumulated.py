"""Gradients that are added up over steps because nobody clears them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Early,
    Factor,
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


class AccumulatedParameters(Patient):
    """What can be said of `accumulated_gradient`."""

    growth: Factor = 3.0
    """Gradients of weights grow by so much, against those of the outputs they make."""

    change: Fraction = 0.4
    """From record to record, a mean changes by less than this share of itself."""

    share: Share = 0.7
    """In so many of the weights it must be so at once."""


class AccumulatedGradient(SlotRule):
    """Gradients that are added up over steps because nobody clears them."""

    name = "accumulated_gradient"
    severity = "error"
    certainty = 0.75
    definition = (
        "Against the gradient of the layer's own output (l2), that of its weight has grown to "
        "`growth` times what it was in the first three records, and from record to record its "
        "mean changes by less than `change` of itself, or its smallest and its largest element by "
        "less than half as much; in at least `share` of all weights, for `patience` records in a "
        "row. A sum over all steps behaves like this, the gradient of one batch does not: it is "
        "proportional to the output's gradient, and its mean is mostly noise."
    )
    source = "Own derivation; a missing `zero_grad()` is in TheDeepChecker's list of bugs."
    advice = "Call `optimizer.zero_grad()` once per optimizer step, before the backward."
    Parameters = AccumulatedParameters
    statistics = ("l2", "mean", "min", "max")
    evidence = "growth against the output's gradient"
    needs = (
        "gradients of outputs and of parameters, {select: '**', capture: [output_grad, "
        "parameter_grad]}"
    )

    _early = per_run(Early, 3)
    _previous = per_run(lambda: {name: Previous() for name in ("mean", "min", "max")})

    def wants(self, table: SlotTable) -> Mask:
        """Returns the gradients of weights whose layers' outputs have gradients, too."""
        wanted = table.weight_gradients
        partner = _output_gradients(table)
        return wanted & table.where(lambda info: info.key.node in partner)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Follows the ratio of both gradients."""
        others = window.table.remembered((_partners, len(at)), lambda t: _partners(t, at))
        ratio = window.read("l2", at) / window.read("l2", others)
        ratio = np.where(np.isfinite(ratio) & (ratio > 0), ratio, np.nan).astype(np.float64)
        growth = ratio / self._early.look(at, ratio)
        change = {name: self._change(window, at, name) for name in self._previous}
        smooth = change["mean"] < self.parameters.change
        smooth |= np.maximum(change["min"], change["max"]) < self.parameters.change / 2
        so = (growth > self.parameters.growth) & smooth
        many = so.mean(1, keepdims=True) >= self.parameters.share
        return so & many, growth

    def _change(self, window: Window, at: Slots, name: str) -> NDArray[np.float64]:
        """Returns by how much of itself a statistic has changed since the record before."""
        value = window.read(name, at).astype(np.float64)
        return np.asarray(np.abs(value - self._previous[name].look(at, value)) / np.abs(value))

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how far they have grown."""
        return (
            "Gradients of earlier steps are not cleared: those of the weights are the sums of "
            f"many steps, {self.streak.worst[slot]:.3g} times larger than at first, "
            f"{scene.table.place(slot)} for one, while those of the outputs are not."
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
