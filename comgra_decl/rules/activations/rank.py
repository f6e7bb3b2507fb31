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


_FIRST = 5  # records whose median is the initial value


class RankParameters(Patient):
    """Options of `rank_collapse`."""

    fall: Fraction = 0.2
    """Smallest allowed rank, relative to its initial value."""


class RankCollapse(SlotRule):
    """Weights or representations that lose rank."""

    name = "rank_collapse"
    certainty = 0.55
    definition = (
        "For `patience` records in a row, the effective rank of a matrix is below `fall` times "
        f"its initial value (the median over the first {_FIRST} records). If the effective rank "
        "is not recorded, the rule uses the stable rank."
    )
    source = (
        "Roy and Vetterli (2007) for the effective rank; msprobe for monitoring the stable rank."
    )
    advice = (
        "Check whether the learning rate or the weight decay is too high, whether normalization is "
        "missing, and whether the objective has a collapsed solution."
    )
    explained_by = ("nonfinite", "exploding_gradient", "input_independence")
    explained_by_earlier = ("shrinking_weight",)
    Parameters = RankParameters
    of_state = True
    any_statistic = RANKS
    lowest, evidence = True, "share of its initial rank"
    needs = "weights, with `stats: [..., effective_rank]`"

    _early = per_run(Early, _FIRST)

    def wants(self, table: SlotTable) -> Mask:
        """Return weights and outputs; the statistic is NaN for tensors without a rank."""
        return table.parameters | table.outputs

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return the rank divided by its initial value."""
        name = next((name for name in RANKS if window.has(name)), None)
        if name is None:
            nothing = np.full((len(window), len(at)), np.nan)
            return np.zeros(nothing.shape, np.bool_), nothing
        rank = window.read(name, at).astype(np.float64)
        share = rank / self._early.look(at, rank)
        return share < self.parameters.fall, share

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} has lost rank: its rank has fallen to "
            f"{self.streak.worst[slot]:.1%} of its initial value."
        )
