"""Changes to the data or the learning rate after which the loss of a healthy run may jump.

In a curriculum, after a change of task, or in a schedule with restarts, the model receives
different data or takes larger steps again. Such a jump says nothing about the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import OPTIMIZERS
from comgra_decl.rules.memory import grown
from comgra_decl.rules.settings import parameter_groups
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Window

_USUAL = 5
"""Number of earlier records that define the usual size of a tensor."""

_OTHER = 1.15
"""Smallest factor between a tensor's size and its usual size that counts as a change."""

_RAISED = 1.5
"""Smallest factor by which a learning rate rises at a restart."""


_MOST = 255
"""Maximum number of changes of each kind to remember."""


class Phases:
    """Finds the records in which inputs, targets or the learning rate differ from earlier ones.

    A tensor has changed if its number of elements per sample, its mean magnitude or its standard
    deviation lies outside the range of the previous five records by a factor of 1.15.
    """

    def __init__(self) -> None:
        self._data: list[tuple[int, int]] = []  # records before and after a change
        self._rate: list[tuple[int, int]] = []
        self._table: SlotTable | None = None
        self._at: NDArray[np.int64] = np.zeros(0, np.int64)
        self._past = np.full((_USUAL, 3, 0), np.nan)  # latest records, measures, slots
        self._step = -1
        self._rates: float | None = None

    def look(self, window: Window) -> None:
        """Process the next training records."""
        if window.table is not self._table:
            self._table = window.table
            self._at = np.flatnonzero(
                window.table.where(
                    lambda i: i.kind in ("input", "target") and i.key.pass_ == "forward"
                )
            )
            self._past = grown(self._past, len(self._at), np.nan)
        before = [self._step, *window.steps[:-1].tolist()]
        if len(self._at):
            for row in np.flatnonzero(self._changed(window)).tolist():
                self._data = [*self._data[-_MOST:], (before[row], int(window.steps[row]))]
        for step, earlier, facts in zip(window.steps.tolist(), before, window.facts, strict=False):
            self._follow(step, earlier, facts.get(OPTIMIZERS) or ())
        self._step = int(window.steps[-1])

    def _changed(self, window: Window) -> NDArray[np.bool_]:
        """Return in which records a tensor differs from those in the five preceding records."""
        sizes = np.full((len(window), 3, len(self._at)), np.nan)
        sizes[:, 0] = window.elements(self._at)
        sizes[:, 0][~window.present[:, self._at]] = np.nan
        for measure, name in enumerate(("abs_mean", "std"), 1):
            if window.has(name):
                sizes[:, measure] = window.read(name, self._at)
        rows = np.concatenate((self._past, sizes))
        lags = [rows[_USUAL - lag : len(rows) - lag] for lag in range(1, _USUAL + 1)]
        known = np.add.reduce([~np.isnan(part) for part in lags]) > 1
        with np.errstate(invalid="ignore"):
            above = sizes > _OTHER * np.fmax.reduce(lags)
            below = sizes * _OTHER < np.fmin.reduce(lags)
        self._past = rows[-_USUAL:]
        return np.asarray(((above | below) & known).any((1, 2)))

    def _follow(self, step: int, earlier: int, optimizers: Sequence[Mapping[str, Any]]) -> None:
        rates = [rate for rate, _, _ in parameter_groups(optimizers)]
        if not rates:
            return
        rate = max(rates)
        if self._rates is not None and rate > _RAISED * self._rates > 0:
            self._rate = [*self._rate[-_MOST:], (earlier, step)]
        self._rates = rate

    def data_changed(self, first: int, last: int) -> bool:
        """Return whether the data changed after step `first` and no later than step `last`.

        Also True if the records bracket the change less tightly.
        """
        return _between(self._data, first, last)

    def rate_rose(self, first: int, last: int) -> bool:
        """Return whether the learning rate jumped in these steps."""
        return _between(self._rate, first, last)


def _between(spans: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    """Return whether a span (before, after] overlaps with (first, last]; spans are in order."""
    at = bisect_left(spans, (last, 0))  # those that begin before `last`
    return at > 0 and spans[at - 1][1] > first
