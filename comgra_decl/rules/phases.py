"""Changes of the data or of the learning rate, after which a loss may jump in a healthy training.

In a curriculum, a change of task, or a schedule with restarts, the loss compares a model with
other data than before, or the model takes larger steps again. Such a loss says nothing about the
model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.settings import parameter_groups
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Window

_USUAL = 5
"""Number of earlier records that define the usual size of a tensor."""

_OTHER = 1.15
"""Smallest factor between the size of a tensor and its usual size that is a change."""

_RAISED = 1.5
"""Smallest factor by which a learning rate rises at a restart."""


_MOST = 255
"""Maximum number of changes of each kind to remember."""


class Phases:
    """Finds the records in which inputs, targets or the learning rate differ from those before.

    A tensor has changed if its number of elements per sample, its mean magnitude or its standard
    deviation lies outside the range of the previous five records by a factor of 1.15.
    """

    def __init__(self) -> None:
        self._data: list[tuple[int, int]] = []  # records before and after a change
        self._rate: list[tuple[int, int]] = []
        self._table: SlotTable | None = None
        self._at: NDArray[np.int64] = np.zeros(0, np.int64)
        self._past: list[NDArray[np.float64]] = []  # of the latest records, [measures, slots]
        self._step = -1
        self._rates: float | None = None

    def look(self, window: Window) -> None:
        """Processes the next training records."""
        if window.table is not self._table:
            self._table = window.table
            self._at = np.flatnonzero(
                window.table.where(
                    lambda i: i.kind in ("input", "target") and i.key.pass_ == "forward"
                )
            )
        names = [name for name in ("abs_mean", "std") if window.has(name)]
        measures = [window.read(name, self._at).astype(np.float64) for name in names]
        sizes = np.stack([window.elements(self._at), *measures], 1)  # [records, measures, slots]
        for row, step in enumerate(window.steps.tolist()):
            self._compare(step, sizes[row])
            facts: Mapping[str, Any] = window.facts[row] if window.facts else {}
            self._follow(step, facts.get("optimizers") or ())
            self._step = step

    def _compare(self, step: int, size: NDArray[np.float64]) -> None:
        past = [p for p in self._past if p.shape == size.shape]
        if len(past) >= 2:
            known = np.stack(past)
            with np.errstate(invalid="ignore"):
                above = size > _OTHER * np.fmax.reduce(known)
                below = size * _OTHER < np.fmin.reduce(known)
            if (above | below).any():
                self._data = [*self._data[-_MOST:], (self._step, step)]
        self._past = [*self._past[1 - _USUAL :], size]

    def _follow(self, step: int, optimizers: Sequence[Mapping[str, Any]]) -> None:
        rates = [rate for rate, _, _ in parameter_groups(optimizers)]
        if not rates:
            return
        rate = max(rates)
        if self._rates is not None and rate > _RAISED * self._rates > 0:
            self._rate = [*self._rate[-_MOST:], (self._step, step)]
        self._rates = rate

    def data_changed(self, first: int, last: int) -> bool:
        """Returns whether the data changed after step `first` and no later than step `last`.

        True as well if the records enclose the change less narrowly.
        """
        return _between(self._data, first, last)

    def rate_rose(self, first: int, last: int) -> bool:
        """Returns whether the learning rate jumped in these steps."""
        return _between(self._rate, first, last)


def _between(spans: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Returns whether a span (before, after] overlaps with (first, last]; spans are in order."""
    at = bisect_left(spans, (last, 0))  # those that begin before `last`
    return at > 0 and spans[at - 1][1] > first
