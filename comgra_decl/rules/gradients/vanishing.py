"""Gradients that die on their way to the first layers."""

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
    per_run,
    row_quantile,
)


class VanishingParameters(Patient):
    """What can be said of `vanishing_gradient`."""

    patience: Count = 10
    """For so many records in a row it must be so; the keys of attention begin like this."""

    ratio: Fraction = 1e-3
    """A gradient is too small below this share of the upper quartile of all gradients."""

    fall: Fraction = 1e-3
    """Below this part of the share that it had at first, it has died during the training."""


class VanishingGradient(SlotRule):
    """Gradients that die on their way to the first layers."""

    name = "vanishing_gradient"
    certainty = 0.7
    definition = (
        "The l2 norm of the gradient of a module's output (of a weight, where outputs' gradients "
        "are not recorded) is below `ratio` times the upper quartile of all such gradients of the "
        "step, in every iteration of the module, for `patience` records, though not exactly zero; "
        "or that share is below `fall` times what it was at first (median of five records). At "
        "least four are compared."
    )
    source = (
        "AutoTrainer (norm of the first layer below 1e-3 of that of the last one); relative to the "
        "other layers, so that neither the loss's scale nor the width matters."
    )
    advice = (
        "Use normalisation, residual connections or another activation function (ReLU, GELU) "
        "between this layer and the loss, or initialise by He or Glorot."
    )
    explained_by = ("nonfinite", "saturated", "dead_units", "poor_initialisation")
    Parameters = VanishingParameters
    statistics = ("l2",)
    lowest, backwards, evidence = True, True, "share of the upper quartile"
    needs = "gradients, such as {select: '**', capture: [output_grad]}"

    _early = per_run(Early, 5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the gradients of outputs, or else of weights."""
        return table.layer_gradients

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares each gradient with the upper quartile of its step."""
        size = window.read("l2", at).astype(np.float64)
        known = np.where(np.isfinite(size) & (size > 0), size, np.nan)
        enough = (~np.isnan(known)).sum(1) >= 4
        share = _largest_of_node(window.table, at, known) / row_quantile(known, 0.75)
        share[~enough] = np.nan
        fallen = share < self.parameters.fall * self._early.look(at, share)
        return (share < self.parameters.ratio) | fallen, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how small it is."""
        share = self.streak.worst[slot]
        return (
            f"The gradient dies on its way back: at {scene.table.place(slot)} it is {share:.1e} "
            "times that of the upper quartile of layers."
        )


def _largest_of_node(
    table: SlotTable, at: Slots, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns, for each column, the largest size of all iterations of its tensor, [k, slots]."""
    group = table.remembered((_largest_of_node, len(at)), lambda t: _group(t, at))
    if group.max(initial=-1) == len(group) - 1:
        return sizes
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    largest = np.fmax.reduceat(sizes[:, order], starts, axis=1)
    return np.asarray(largest[:, group], np.float64)


def _group(table: SlotTable, at: Slots) -> Slots:
    """Numbers the tensors, all iterations of one alike."""
    names = [(table.infos[slot].key.node, table.infos[slot].key.role) for slot in at.tolist()]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)
