"""Matrices that lose rank."""

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


_FIRST = 5  # records; their median is the initial value


class RankParameters(Patient):
    """Options of `rank_collapse`."""

    fall: Fraction = 0.2
    """How far the rank may fall, relative to its first value."""


class RankCollapse(SlotRule):
    """Weights or representations that lose rank."""

    name = "rank_collapse"
    certainty = 0.55
    definition = (
        "The effective rank (or else the stable rank) of a matrix is below `fall` times its first "
        f"value (median of {_FIRST} records) for `patience` records in a row."
    )
    source = "Roy and Vetterli (2007) for the effective rank; msprobe monitors the stable rank."
    advice = (
        "Look for a learning rate that is too high, too much weight decay, missing normalization, "
        "or an objective with a collapsed solution."
    )
    explained_by = ("nonfinite", "exploding_gradient", "input_independence")
    explained_by_earlier = ("shrinking_weight",)
    Parameters = RankParameters
    of_state = True
    any_statistic = RANKS
    lowest, evidence = True, "share of its first rank"
    needs = "weights, with `stats: [..., effective_rank]`"

    _early = per_run(Early, _FIRST)

    def wants(self, table: SlotTable) -> Mask:
        """Returns weights and outputs; where a tensor has no rank, it is NaN."""
        return table.parameters | table.outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares the rank with its first value."""
        name = next((name for name in RANKS if window.has(name)), None)
        if name is None:
            nothing = np.full((len(window), len(at)), np.nan)
            return np.zeros(nothing.shape, np.bool_), nothing
        rank = window.read(name, at).astype(np.float64)
        share = rank / self._early.look(at, rank)
        return share < self.parameters.fall, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message for a slot."""
        return (
            f"{scene.table.place(slot)} has lost rank: it has fallen to "
            f"{self.streak.worst[slot]:.1%} of its first value."
        )
