"""Dropout that drops nearly all elements."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    NO_SLOTS,
    Finding,
    Fraction,
    Mask,
    Measured,
    Patient,
    Place,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    single_sources,
)


class DropoutParameters(Patient):
    """Options of `heavy_dropout`."""

    kept: Fraction = 0.15
    """Smallest allowed share of input elements that are kept."""


class HeavyDropout(SlotRule):
    """Dropout that drops nearly all elements."""

    name = "heavy_dropout"
    certainty = 0.7
    definition = (
        "For `patience` records in a row, the fraction of nonzero elements in the output of a "
        "Dropout module is less than `kept` times that in its input. Records in which only the "
        "input has negative elements are ignored, because an activation function lies between. "
        "Also reported: a dropout function that is called with a probability of at least 0.8 in "
        "the first records."
    )
    source = (
        "Srivastava et al. (2014), who keep at least half of the elements. In PyTorch, the "
        "argument is the probability of dropping an element; in some other libraries, it is the "
        "probability of keeping one."
    )
    advice = (
        "Reduce `p`, the probability of dropping an element. Values from 0.1 to 0.5 are common."
    )
    Parameters = DropoutParameters
    statistics = ("zero_fraction",)
    lowest, evidence, of_graph = True, "share that remains", True
    needs = "outputs of Dropout modules and of the modules before them, with `graph: true`"

    _sources = NO_SLOTS

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about what dropout modules keep, or about the argument of a call."""
        found = super().findings(scene)
        calls = scene.told("dropout")
        if found or not calls:
            return found
        fact = max(calls, key=lambda each: float(each["rate"]))
        return [
            self.finding(
                scene,
                place=Place(str(fact["where"])),
                first_step=0,
                message=f"{fact['where']} drops {float(fact['rate']):.0%} of the elements of a "
                f"tensor of shape {fact['shape']}. The argument of dropout is the probability of "
                "dropping an element.",
                evidence={"rate": float(fact["rate"])},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        return None if scene.told("dropout") else super().missing(scene)

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs of Dropout modules with a single input."""
        self._sources = single_sources(self.scene)
        dropout = table.where(lambda i: "Dropout" in i.module_class and i.key.role == "output")
        return table.outputs & dropout & (self._sources >= 0)

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the share of nonzero elements that is kept."""
        left = 1 - window.read("zero_fraction", at).astype(np.float64)
        before = 1 - window.read("zero_fraction", self._sources[at]).astype(np.float64)
        if window.has("min"):
            lowest = window.read("min", self._sources[at])
            between = (lowest < 0) & (window.read("min", at) >= 0)
            before = np.where(between, np.nan, before)
        share = np.where(before > 0, left / before, np.nan)
        return share < self.parameters.kept, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} keeps {self.streak.worst[slot]:.0%} of its input. The "
            "argument of Dropout is the probability of dropping an element."
        )
