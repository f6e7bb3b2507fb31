"""Collect the results of `measures` for a step's tensors as extra columns of its raw sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.records import AGGREGATES
from comgra_decl.stats.device import ASYNCHRONOUS
from comgra_decl.stats.measures import Measure
from comgra_decl.stats.quiet import copied_to_host, quiet
from comgra_decl.stats.spectral import Finish
from comgra_decl.stats.statistics import FORMULAS
from comgra_decl.stats.support import plain, with_memory


@dataclass(slots=True)
class _Piece:
    """Columns of one tensor, in the form in which they were computed."""

    tensor: int
    columns: list[int]
    packed: Tensor  # float64 [samples, c]; on the host valid after `event`
    finish: Finish | None
    event: Any


class Extras:
    """The opt-in statistics of the current step, one column per name.

    Args:
        names: all names, in stored order.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._columns = {name: i for i, name in enumerate(self.names)}
        self._pieces: list[_Piece] = []
        self._done: set[tuple[int, Measure]] = set()

    def clear(self) -> None:
        """Start another step."""
        self._pieces, self._done = [], set()

    def add(self, index: int, tensor: Tensor, batch_dim: int | None, measure: Measure) -> bool:
        """Measure the tensor with the number `index`. Return whether the measure applies.

        Raises:
            FunctionError: a custom function failed; its statistic is missing.
        """
        if (index, measure) in self._done:  # the same tensor under another name
            return True
        self._done.add((index, measure))
        with quiet():
            x = with_memory(plain(tensor)).detach()
            x = x.unsqueeze(0) if batch_dim is None else x.movedim(batch_dim, 0)
            if x.device.type not in ("cpu", *ASYNCHRONOUS):
                x = x.cpu()
            found = measure(x)
            if found is None:
                return False
            packed, finish = found
            event = None
            if packed.device.type != "cpu":
                packed, event = copied_to_host(packed)
        # a measure computes several names; only some may be selected
        columns = [self._columns.get(name, -1) for name in measure.names]
        self._pieces.append(_Piece(index, columns, packed, finish, event))
        return True

    def finish(
        self,
        starts: NDArray[np.int64],
        rows: NDArray[np.int64],
        aggregates: dict[int, NDArray[np.float64]],
    ) -> tuple[NDArray[np.float64], Callable[[], None]]:
        """End the step.

        Args:
            starts: first row of each tensor.
            rows: number of rows of each tensor.
            aggregates: mean, std and abs-max of each formula, float64 [formulas, 3], for tensors
                with more samples than rows. They are valid once the contents are. The aggregates of
                the extra statistics are appended.

        Returns:
            A float64 tensor of shape [all rows, len(names)], NaN where missing, and a function that
            fills in its contents; callable on another thread.
        """
        table = np.full((int((starts + rows).max(initial=0)), len(self.names)), np.nan)
        pieces, self._pieces, self._done = self._pieces, [], set()
        return table, _Settle(table, (starts, rows), pieces, aggregates)


class _Settle:
    """Fills the table once."""

    def __init__(
        self,
        table: NDArray[np.float64],
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        pieces: list[_Piece],
        aggregates: dict[int, NDArray[np.float64]],
    ) -> None:
        self._table, self._pieces, self._aggregates = table, pieces, aggregates
        self._starts, self._rows = places

    def __call__(self) -> None:
        pieces, self._pieces = self._pieces, []
        with quiet():
            for piece in pieces:
                self._fill(piece)

    def _fill(self, piece: _Piece) -> None:
        if piece.event is not None:
            piece.event.synchronize()
        values = piece.packed.numpy()
        if piece.finish is not None:
            try:
                values = piece.finish(values)
            except np.linalg.LinAlgError:  # did not converge: the value stays missing
                return
        start = self._starts[piece.tensor]
        kept = values[: self._rows[piece.tensor]]
        for i, column in enumerate(piece.columns):
            if column >= 0:
                self._table[start : start + len(kept), column] = kept[:, i]
                if len(kept) < len(values):
                    self._aggregate(piece.tensor, column, values[:, i])

    def _aggregate(self, tensor: int, column: int, values: NDArray[np.float64]) -> None:
        found = self._aggregates[tensor]
        if len(found) == len(FORMULAS):
            blank = np.full((self._table.shape[1], len(AGGREGATES)), np.nan)
            found = self._aggregates[tensor] = np.concatenate((found, blank))
        with np.errstate(all="ignore"):
            found[len(FORMULAS) + column] = values.mean(), values.std(), np.abs(values).max()
