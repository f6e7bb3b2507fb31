"""Answers that become the same for all samples."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.rules.base import Patient, Scene, SlotRule
from comgra_decl.rules.memory import Bools, Early, Slots
from comgra_decl.rules.paths import beyond_targets
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Window
from comgra_decl.spec.base import Number

_NAMES = ("mean", "std", "min", "max", "abs_mean", "l2")


class CollapsingParameters(Patient):
    """What can be said of `collapsing_output`."""

    fall: Annotated[Number, Field(gt=0, lt=1)] = 0.1
    """The variation over the batch falls below this share of what it was at first."""


class CollapsingOutput(SlotRule):
    """Outputs that become more and more the same for all samples."""

    name = "collapsing_output"
    certainty = 0.6
    definition = (
        "The relative variation over the batch (the largest standard deviation of a recorded "
        "statistic of the samples, by its largest magnitude) of a tensor falls below `fall` of "
        "what it was at first (median of five records), for `patience` records."
    )
    source = (
        "comgra's plan (variance over the batch falls: collapse); the debugging chapter's "
        "generator that repeats itself."
    )
    advice = (
        "Of a generator: balance both learning rates, add noise, a gradient penalty or minibatch "
        "statistics. Else look for weight decay that is too strong, or a constant that solves the "
        "task, as in representations without negatives."
    )
    explained_by = (
        "nonfinite",
        "input_independence",
        "large_update",
        "growing_weight",
        "exploding_gradient",
        "saturated",
        "dead_units",
    )
    Parameters = CollapsingParameters
    lowest, evidence = True, "share of its first variation"
    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._early = Early(5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs with more than three samples."""
        return table.outputs & table.where(
            lambda i: i.batch_dim is not None and i.shape[i.batch_dim] > 3
        )

    def measure(self, window: Window, at: Slots) -> tuple[Bools, NDArray[Any]]:
        """Compares the variation over the batch with that of the first records."""
        most = np.full((len(window), len(at)), np.nan)
        for name in (name for name in _NAMES if window.has(name)):
            size = window.read(name, at, "abs_max")
            varied = np.where(size > 0, window.read(name, at, "std") / size, np.nan)
            most = np.fmax(most, varied)
        share = most / self._early.look(at, most)
        return share < self.parameters.fall, share

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses of single samples."""
        return fired[~np.isin(fired, list(beyond_targets(scene)))]

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if not any(name in scene.statistics for name in _NAMES):
            return f"it takes one of the statistics {', '.join(_NAMES)}; add it to `stats`"
        return super().missing(scene)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how little samples differ."""
        return (
            f"{scene.table.place(slot)} becomes the same for all samples: it varies over the batch "
            f"by {self.streak.worst[slot]:.1%} of what it did at first."
        )
