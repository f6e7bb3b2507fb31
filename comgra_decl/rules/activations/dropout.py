"""Dropout that leaves next to nothing."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Fraction,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    single_sources,
)


class DropoutParameters(Patient):
    """What can be said of `heavy_dropout`."""

    patience: Count = 5
    """For so many records in a row it must be so."""

    kept: Fraction = 0.25
    """Of what enters, less than this share is left."""


class HeavyDropout(SlotRule):
    """Dropout that leaves next to nothing."""

    name = "heavy_dropout"
    certainty = 0.7
    definition = (
        "The share of elements that are not zero behind a Dropout module is less than `kept` of "
        "that share before it, for `patience` records."
    )
    source = (
        "Srivastava et al. (2014) keep at least half; the argument is the share to drop in torch "
        "and the share to keep in others."
    )
    advice = "torch's Dropout takes the share that is dropped: 0.1 to 0.5 are usual."
    Parameters = DropoutParameters
    statistics = ("zero_fraction",)
    lowest, evidence, of_graph = True, "share that is left", True
    needs = "outputs of Dropout modules and of what is before them, with `graph: true`"

    _sources: Slots = np.zeros(0, np.int64)

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs of Dropout modules that have one predecessor."""
        self._sources = single_sources(self.scene)
        dropout = table.where(lambda i: "Dropout" in i.module_class and i.key.role == "output")
        return table.outputs & dropout & (self._sources >= 0)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the zeros on both sides."""
        left = 1 - window.read("zero_fraction", at).astype(np.float64)
        before = 1 - window.read("zero_fraction", self._sources[at]).astype(np.float64)
        share = np.where(before > 0, left / before, np.nan)
        return share < self.parameters.kept, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how little is left."""
        return (
            f"{scene.table.place(slot)} leaves {self.streak.worst[slot]:.0%} of what enters: its "
            "probability is that of dropping."
        )
