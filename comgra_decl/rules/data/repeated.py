"""The same batch in every step."""

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
    """The same batch in every step."""

    name = "repeated_batch"
    severity = "hint"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, all inputs and targets that vary across the batch are "
        "the same as in the previous record: all of their recorded statistics have exactly the "
        "same mean and standard deviation across the batch."
    )
    source = (
        "Our own definition. The usual cause is a loader whose iterator is created in every step."
    )
    advice = (
        "Call iter(loader) once per epoch instead of once per step, and do not set the seed "
        "inside the loop. If a single batch is intended (full-batch training, overfitting one "
        "batch), disable this rule."
    )
    of_state = True
    statistics = ("mean",)
    evidence = "deviation across the batch"
    needs = "inputs of the model, which are recorded if `nodes` selects its root"

    _before: dict[tuple[str, str], Previous] = per_run(dict)

    def wants(self, table: SlotTable) -> Mask:
        """Return inputs and targets with a batch dimension."""
        return table.where(
            lambda i: (
                i.kind in ("input", "target")
                and i.key.pass_ == "forward"
                and i.batch_dim is not None
            )
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where all statistics are identical to those in the previous record."""
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
        """Return no slots if any input or target that varies across the batch changes."""
        everything = np.flatnonzero(self.wants(scene.table))
        seen = everything[everything < len(self.streak.seen)]
        often = seen[self.streak.seen[seen] > 2 * self.patience]
        others = np.setdiff1d(often, fired)
        return fired if not len(others) else fired[:0]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} is the same in every record {self.streak.since(slot)}: "
            "every step uses the same batch."
        )
