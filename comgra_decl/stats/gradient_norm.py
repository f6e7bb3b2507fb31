"""The norm of the whole gradient, from the raw sums of a record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import Layout, Raw, RawStep, SlotInfo


class GradientNorm:
    """Computes the L2 norm of the gradients of all parameters together, on the writer thread.

    Formula: the root of the sum of squares, where x = (x - p) + p for each row's pivot p:
    sum x^2 = sum (x - p)^2 + 2 p sum (x - p) + n p^2.
    """

    def __init__(self) -> None:
        self._slots: set[int] = set()
        self._partial = False  # whether other processes hold parts of the parameters
        self._layout: Layout | None = None  # the layout of `_rows` and `_elements`
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._elements: NDArray[np.float64] = np.empty(0)

    def add(self, slots: Iterable[SlotInfo]) -> None:
        """Add slots of the run; only the gradients of parameters matter."""
        for slot in slots:
            if slot.kind == "parameter" and slot.key.pass_ == "grad":
                self._slots.add(slot.id)
                self._partial = self._partial or slot.piece is not None
                self._layout = None

    def of(self, steps: Iterable[RawStep]) -> list[float | None]:
        """Return the norm of the gradients that the optimizer used, for each record.

        It is None if the record has none, and NaN if any gradient is not finite.
        """
        found: list[float | None] = []
        for _, alike in groupby(steps, key=lambda step: (id(step.layout), bool(step.new_slots))):
            found += self._of_alike([*alike])
        return found

    def _of_alike(self, steps: Sequence[RawStep]) -> list[float | None]:
        """Return the norms of records with one layout, all at once."""
        for step in steps:
            if step.new_slots:
                self.add(step.new_slots)
        if steps[0].layout is not self._layout:  # rare, because steps share their layouts
            self._find(steps[0].layout)
        if not len(self._rows) or self._partial:
            return [None] * len(steps)
        raw = np.stack([step.raw[self._rows] for step in steps])
        pivot = raw[:, :, Raw.PIVOT]
        with np.errstate(all="ignore"):  # of sums that are not finite
            terms = raw[:, :, Raw.SQUARES] + pivot * (
                2 * raw[:, :, Raw.SUM] + self._elements * pivot
            )
            norms = np.sqrt(np.maximum(terms.sum(axis=1), 0.0))
        norms[raw[:, :, Raw.NONFINITE].any(axis=1)] = math.nan
        return [*map(float, norms)]

    def _find(self, layout: Layout) -> None:
        """Find the rows of the gradients in a layout, and the number of elements of each row."""
        chosen = np.isin(layout.slots, np.fromiter(self._slots, np.int64, len(self._slots)))
        tensors = np.unique(layout.tensors[chosen])  # a parameter with several names counts once
        rows = [
            np.arange(layout.starts[tensor], layout.starts[tensor] + layout.rows[tensor])
            for tensor in tensors
        ]
        self._layout = layout
        self._rows = np.concatenate([np.empty(0, np.int64), *rows])
        self._elements = np.repeat(layout.elements[tensors], layout.rows[tensors]).astype(float)
