"""The same batch again and again."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Mask,
    Measured,
    Previous,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    per_run,
)

_NAMES = ("mean", "std", "l2", "abs_mean", "min", "max")


class RepeatedBatch(SlotRule):
    """The same batch again and again."""

    name = "repeated_batch"
    severity = "hint"
    certainty = 0.6
    definition = (
        "In every input and target that varies over the batch, mean and standard deviation over "
        "the batch of all recorded statistics are exactly those of the record before, for "
        "`patience` records in a row."
    )
    source = "Own definition; a loader whose iterator is made anew in each step does this."
    advice = (
        "Call iter(loader) once per epoch, not once per step; do not seed within the loop. If one "
        "batch is all there is (full-batch training, over-fitting one batch), switch the rule off."
    )
    statistics = ("mean",)
    evidence = "deviation over the batch"
    needs = "inputs of the model, which are recorded where `nodes` selects its root"

    _before: dict[tuple[str, str], Previous] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Returns inputs and targets with a batch dimension, the first call's."""
        return table.where(
            lambda i: (
                i.kind in ("input", "target")
                and i.key.pass_ == "forward"
                and i.batch_dim is not None
            )
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares with the record before."""
        same = np.ones((len(window), len(at)), np.bool_)
        varied = np.zeros(same.shape, np.float64)
        for name in (name for name in _NAMES if window.has(name)):
            for over in ("mean", "std"):
                value = window.read(name, at, over).astype(np.float64)
                known = self._before.setdefault((name, over), Previous())
                same &= value == known.look(at, value)
                if over == "std":
                    varied = np.fmax(varied, value)
        return same & (varied > 0), varied

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Keeps none if any of the inputs and targets that vary over the batch is another one."""
        everything = np.flatnonzero(self.wants(scene.table))
        seen = everything[everything < len(self.streak.seen)]
        often = seen[self.streak.seen[seen] > 2 * self.patience]
        others = np.setdiff1d(often, fired)
        return fired if not len(others) else fired[:0]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says since when."""
        return (
            f"{scene.table.place(slot)} is the same in every record from step "
            f"{self.streak.first[slot]} on: one batch, again and again."
        )
