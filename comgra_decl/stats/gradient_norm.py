"""The norm of the whole gradient, from the raw sums of a record."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from comgra_decl.records import Raw, RawStep, SlotInfo


class GradientNorm:
    """Computes the L2 norm of the gradients of all parameters together, on the writer thread.

    Formula: the root of the sum of squares, where x = (x - p) + p for each row's pivot p:
    sum x^2 = sum (x - p)^2 + 2 p sum (x - p) + n p^2.
    """

    def __init__(self) -> None:
        self._slots: set[int] = set()
        self._partial = False  # whether other processes hold parts of the parameters

    def add(self, slots: Iterable[SlotInfo]) -> None:
        """Add slots of the run; only the gradients of parameters matter."""
        for slot in slots:
            if slot.kind == "parameter" and slot.key.pass_ == "grad":
                self._slots.add(slot.id)
                self._partial = self._partial or slot.piece is not None

    def of(self, step: RawStep) -> float | None:
        """Return the norm of the gradients that the optimizer used; None if the record has none.

        It is NaN if any gradient is not finite.
        """
        self.add(step.new_slots)
        layout = step.layout
        chosen = np.isin(layout.slots, np.fromiter(self._slots, np.int64, len(self._slots)))
        tensors = np.unique(layout.tensors[chosen])  # a parameter with several names counts once
        if not len(tensors) or self._partial:
            return None
        total = 0.0
        for tensor in tensors:
            start, rows = int(layout.starts[tensor]), int(layout.rows[tensor])
            raw = step.raw[start : start + rows]
            if raw[:, Raw.NONFINITE].any():
                return math.nan
            pivot, count = raw[:, Raw.PIVOT], float(layout.elements[tensor])
            sums = raw[:, Raw.SQUARES] + 2 * pivot * raw[:, Raw.SUM] + count * pivot**2
            total += float(sums.sum())
        return math.sqrt(max(total, 0.0))
