"""Gradients that vanish on their way back to the first layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Early,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    normalises,
    per_run,
    row_quantile,
)

_FIRST = 5  # records; their median is the start value
_FEWEST = 4  # gradients to compare


class VanishingParameters(Patient):
    """The options of `vanishing_gradient`."""

    patience: Count = 10
    """How many records in a row must meet the condition; keys of attention start out like this."""

    ratio: Fraction = 1e-3
    """The smallest gradient allowed, relative to the upper quartile of all gradients."""

    fall: Fraction = 1e-3
    """How far that ratio may fall, relative to its first value."""


class VanishingGradient(SlotRule):
    """Gradients that vanish on their way back to the first layers."""

    name = "vanishing_gradient"
    certainty = 0.7
    definition = (
        "For `patience` records in a row, the l2 norm of the gradient of a module's output (or of "
        "a weight, if gradients of outputs are not recorded) is below `ratio` times the upper "
        "quartile of all such gradients in the step, in every iteration of the module, though not "
        "exactly zero; or that ratio has fallen below `fall` times its first value (median of "
        f"{_FIRST} records). Needs at least {_FEWEST} gradients to compare."
    )
    source = (
        "AutoTrainer (norm of the first layer below 1e-3 of that of the last one); here relative "
        "to the other layers, so that neither the scale of the loss nor the width matters."
    )
    advice = (
        "Between this layer and the loss, use normalization, residual connections or another "
        "activation function (ReLU, GELU), or initialize by He or Glorot."
    )
    explained_by = ("nonfinite", "saturated", "dead_units", "poor_initialisation")
    explained_by_earlier = ("shrinking_weight",)
    Parameters = VanishingParameters
    of_state = True
    statistics = ("l2",)
    lowest, backwards, evidence = True, True, "share of the upper quartile"
    needs = "gradients, such as {select: '**', capture: [output_grad]}"

    _early = per_run(Early, _FIRST)

    def advise(self, scene: Scene) -> str:
        """Returns what to do, by what the optimizers are set to."""
        if not normalises(scene):
            return self.advice
        return (
            "Between this layer and the loss, use residual connections or another activation "
            "function (ReLU, GELU), or initialize by He or Glorot."
        )

    def wants(self, table: SlotTable) -> Mask:
        """Returns the gradients of outputs; if there are none, those of weights."""
        return table.layer_gradients

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares each gradient with the upper quartile of its step."""
        size = window.read("l2", at).astype(np.float64)
        known = np.where(np.isfinite(size) & (size > 0), size, np.nan)
        enough = (~np.isnan(known)).sum(1) >= _FEWEST
        share = _largest_of_node(window.table, at, known) / row_quantile(known, 0.75)
        share[~enough] = np.nan
        fallen = share < self.parameters.fall * self._early.look(at, share)
        return (share < self.parameters.ratio) | fallen, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        share = self.streak.worst[slot]
        return (
            f"The gradient vanishes on its way back: {scene.table.place(slot)} is {share:.1e} "
            "times the upper quartile of all layers."
        )


def _largest_of_node(
    table: SlotTable, at: Slots, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns, per column, the largest size over all iterations of its tensor, [records, slots]."""
    group = table.remembered((_largest_of_node, len(at)), lambda t: _group(t, at))
    if group.max(initial=-1) == len(group) - 1:
        return sizes
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    largest = np.fmax.reduceat(sizes[:, order], starts, axis=1)
    return np.asarray(largest[:, group], np.float64)


def _group(table: SlotTable, at: Slots) -> Slots:
    """Numbers the tensors; all iterations of a tensor get the same number."""
    names = [(table.infos[slot].key.node, table.infos[slot].key.role) for slot in at.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)
