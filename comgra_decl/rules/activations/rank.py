"""Representations that lose their dimensions."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
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
)

RANKS = ("effective_rank", "stable_rank")


class RankParameters(Patient):
    """What can be said of `rank_collapse`."""

    fall: Fraction = 0.2
    """Below this share of its first rank, a matrix has collapsed."""


class RankCollapse(SlotRule):
    """Weights or representations that lose their dimensions."""

    name = "rank_collapse"
    certainty = 0.55
    definition = (
        "The effective rank (or else the stable rank) of a matrix falls below `fall` of what it "
        "was at first (median of five records), for `patience` records."
    )
    source = "Roy and Vetterli (2007) for the effective rank; msprobe watches the stable rank."
    advice = (
        "Look for a learning rate that is too large, too much weight decay, a missing "
        "normalisation, or an objective that has a collapsed solution."
    )
    explained_by = ("nonfinite", "exploding_gradient", "input_independence")
    Parameters = RankParameters
    any_statistic = RANKS
    lowest, evidence = True, "share of its first rank"
    needs = "weights, with `stats: [..., effective_rank]`"

    _early = per_run(Early, 5)

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights and outputs; where they have no rank, it is NaN."""
        return table.parameters | table.outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with the first rank."""
        name = next((name for name in RANKS if window.has(name)), None)
        if name is None:
            nothing = np.full((len(window), len(at)), np.nan)
            return np.zeros(nothing.shape, np.bool_), nothing
        rank = window.read(name, at).astype(np.float64)
        share = rank / self._early.look(at, rank)
        return share < self.parameters.fall, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how far it has fallen."""
        return (
            f"{scene.table.place(slot)} has lost dimensions: its rank is "
            f"{self.streak.worst[slot]:.1%} of what it was at first."
        )
