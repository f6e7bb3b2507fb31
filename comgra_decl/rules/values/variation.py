"""How much the samples of a batch differ in what is recorded of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.base import Scene, SlotRule
from comgra_decl.rules.memory import Slots
from comgra_decl.rules.window import Window

_NAMES = ("mean", "std", "min", "max", "abs_mean", "l2")


class Varying(SlotRule):
    """A rule about the relative variation over the batch: whichever statistic varies most."""

    needs = "outputs with a batch dimension, {select: '**', capture: [output]}"
    lowest = True

    def variation(self, window: Window, at: Slots) -> NDArray[np.float64]:
        """Returns the largest deviation of a statistic over the batch, by its size, [k, slots].

        NaN where nothing is recorded, all is zero, or the batch has fewer than `fewest_samples`.
        """
        most = np.full((len(window), len(at)), np.nan)
        for name in (name for name in _NAMES if window.has(name)):
            size = window.read(name, at, "abs_max")
            varied = np.where(size > 0, window.read(name, at, "std") / size, np.nan)
            most = np.fmax(most, varied)
        return np.where(window.samples(at) >= self.fewest_samples, most, np.nan)

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if not any(name in scene.statistics for name in _NAMES):
            return f"it takes one of the statistics {', '.join(_NAMES)}; add it to `stats`"
        return super().missing(scene)
