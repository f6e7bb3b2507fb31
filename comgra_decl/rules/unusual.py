"""Which tensors are unusual relative to their own history and to their siblings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.memory import Early, Slots, Streak, row_quantile
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Window

DECADES = 1.0
"""So many powers of ten from what a tensor was like at first, or from its siblings."""

_SIBLINGS = 3  # fewer have no usual size
_FIRST = 5  # records, in which everything finds its size
_SIZES = ("l2", "abs_max", "std")  # whichever is recorded tells the size of a tensor


class Unusual:
    """Follows the size of every tensor; no rule of its own, but what chains of causes are made of.

    A tensor is unusual while its size is ten times larger or smaller than it was in the first five
    records; and in these, while it is so beside the median of its siblings: those of the same kind,
    pass and class of module, per root of the number of elements. Who was unlike its siblings from
    the start has to do with what was wrong from the start, and not with what came later.
    """

    def __init__(self) -> None:
        self._early = Early(_FIRST)
        self._records = 0
        self._settled = -1  # the last of the first steps
        self._own, self._among = Streak(2), Streak(2)
        self._table: SlotTable | None = None
        self._at: Slots = np.zeros(0, np.int64)
        self._groups: list[Slots] = []

    def look(self, window: Window) -> None:
        """Takes the next records of the training."""
        first = window.steps[: max(0, _FIRST - self._records)]
        self._settled = int(first[-1]) if len(first) else self._settled
        self._records += len(window)
        size = next((name for name in _SIZES if window.has(name)), None)
        if size is None:
            return
        if window.table is not self._table:
            self._learn(window.table)
        if not len(self._at):
            return
        with np.errstate(all="ignore"):
            sizes = np.log10(window.read(size, self._at).astype(np.float64))
            if size == "l2":
                sizes -= np.log10(window.elements(self._at)) / 2
        finite = np.where(np.isfinite(sizes), sizes, np.nan)
        own = finite - self._early.look(self._at, finite)
        there = window.there[:, self._at]
        among = np.where(np.isnan(own), self._to_siblings(finite), np.nan)
        for streak, distance in ((self._own, own), (self._among, among)):
            far = np.abs(np.nan_to_num(distance)) > DECADES
            streak.look(window.steps, self._at, hit=far, there=there, evidence=np.abs(distance))

    def _learn(self, table: SlotTable) -> None:
        self._table, self._at = table, np.flatnonzero(table.floating)
        groups: dict[tuple[str, ...], list[int]] = {}
        for column, slot in enumerate(self._at.tolist()):
            info = table.infos[slot]
            role = info.key.role.partition(".")[0]
            name = (info.kind, info.key.pass_, info.module_class, role)
            groups.setdefault(name, []).append(column)
        self._groups = [np.array(g) for g in groups.values() if len(g) >= _SIBLINGS]

    def _to_siblings(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        distance = np.full(sizes.shape, np.nan)
        for columns in self._groups:
            part = sizes[:, columns]
            distance[:, columns] = part - row_quantile(part, 0.5)
        return distance

    def of(self, slot: int, until: int) -> tuple[int, str] | None:
        """Returns since which step a slot is unusual and how; None if it was not by `until`."""
        for streak, sentence in (
            (self._own, "its size left what it was at first by a factor of {:.3g}"),
            (self._among, "its size is {:.3g} times off that of its siblings"),
        ):
            first = int(streak.first[slot]) if 0 <= slot < len(streak.first) else -1
            as_ever = streak is self._among and first <= self._settled < until
            if 0 <= first <= until and not as_ever:
                factor = 10 ** min(300.0, float(streak.worst[slot]))
                return first, sentence.format(factor)
        return None
