"""Recorded samples of inputs and targets, collected from the records of a run.

Eight samples per record are stored by default, so a run of a hundred records contains several
hundred samples of its data. These are enough to compare columns, but not to estimate a density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo
from comgra_decl.rules.memory import Slots
from comgra_decl.rules.table import SlotTable
from comgra_decl.rules.window import Window

FIRST, THEN = 20, 5
"""Number of records read at the start of a run, and the interval between those read later."""

MOST_ROWS = 800
_AHEAD = 4  # tokens that models commonly predict at once, as in Medusa
MOST_COLUMNS = 1024


def read_rows(window: Window) -> NDArray[np.int64]:
    """Return the records of a window whose values are read, for any division into windows."""
    number = window.first + np.arange(len(window))
    return np.flatnonzero((number < FIRST) | (number % THEN == 0))


def input_slots(table: SlotTable) -> Slots:
    """Return the inputs of models with a batch dimension, from the first call of a step."""
    return table.remembered(input_slots, lambda table: np.flatnonzero(table.where(_is_input)))


def _is_input(info: SlotInfo) -> bool:
    first = info.key.node == "input" and info.key.iteration == 0
    return info.kind == "input" and info.key.pass_ == "forward" and first and bool(info.shape)


def target_slots(table: SlotTable) -> Slots:
    """Return the targets, with or without a batch dimension."""
    return table.remembered(target_slots, lambda table: np.flatnonzero(table.where(_is_target)))


def _is_target(info: SlotInfo) -> bool:
    return info.kind == "target" and info.key.pass_ == "forward" and bool(info.shape)


@dataclass
class Rows:
    """Samples of one tensor, collected over records.

    Attributes:
        steps: the step of each collected record.
        parts: the samples of each record, [samples, columns].
    """

    steps: list[int] = field(default_factory=list)
    parts: list[NDArray[np.float64]] = field(default_factory=list)
    count: int = 0

    def add(self, step: int, values: NDArray[np.float64]) -> None:
        """Add the samples of a record, unless there are enough or their shape differs."""
        rows = values.reshape(len(values), -1) if values.size else values.reshape(0, 0)
        known = self.parts[0].shape[1] if self.parts else rows.shape[1]
        if self.is_full or not 0 < rows.shape[1] <= MOST_COLUMNS:
            return
        if rows.shape[1] == known:
            self.steps.append(step)
            self.parts.append(rows)
            self.count += len(rows)

    @property
    def is_full(self) -> bool:
        """Whether further samples are ignored."""
        return self.count >= MOST_ROWS

    @property
    def table(self) -> NDArray[np.float64]:
        """All samples, [rows, columns]."""
        return np.concatenate(self.parts) if self.parts else np.zeros((0, 0))


def values_of(window: Window, row: int, slot: int) -> NDArray[np.float64] | None:
    """Return the recorded samples of a tensor; None if they are not recorded.

    A tensor without a batch dimension counts as a single sample, whose dimension is removed.
    """
    found = window.details.values(row, slot)
    if found is None or not len(found):
        return None
    values = np.asarray(found, np.float64)
    whole = window.table.infos[slot].batch_dim is None and values.ndim > 1 and len(values) == 1
    return values[0] if whole else values


@dataclass
class Tokens:
    """Counts of target tokens that equal the input token at the same or another position.

    Attributes:
        same: at the same position.
        next_: at the next position.
        ahead: number of target tokens whose input has a next token.
        second: at the position after the next.
        previous: at the previous position.
    """

    step: int
    records: int = 0
    count: int = 0
    same: int = 0
    next_: int = 0
    ahead: int = 0
    second: int = 0
    previous: int = 0
    values: set[float] = field(default_factory=set)


def count_tokens(
    known: Tokens, x: NDArray[np.float64], y: NDArray[np.float64], *, whole: bool = True
) -> None:
    """Compare the tokens, or values, of an input and a target, both [samples, positions, ...].

    Args:
        known: the counts to which they are added.
        x: the input.
        y: the target.
        whole: whether they are integers, of which negative ones are ignored targets.
    """
    counts = y >= 0 if whole else np.isfinite(y)
    known.records += 1
    known.count += int(counts.sum())
    known.same += int(((x == y) & counts).sum())
    shifted = counts[:, :-1]
    known.ahead += int(shifted.sum())
    known.next_ += int(((x[:, 1:] == y[:, :-1]) & shifted).sum())
    known.second += int(((x[:, 2:] == y[:, :-2]) & counts[:, :-2]).sum())
    known.previous += int(((x[:, :-1] == y[:, 1:]) & counts[:, 1:]).sum())
    if len(known.values) < 10:
        known.values |= {*np.unique(y[counts]).tolist()}


class NextTokens:
    """Whether the targets of a run are the next tokens, or values, of its last input.

    Values are compared only if they are the only input.

    Attributes:
        tokens: the counts of each input and target, by their slots.
    """

    _NEXT = 0.99  # share of targets that are the next input

    def __init__(self) -> None:
        self.tokens: dict[tuple[int, int], Tokens] = {}
        self._sources: set[int] = set()

    def look(self, window: Window) -> None:
        """Compare targets with the input, shifted by one."""
        infos = window.table.infos
        sources = input_slots(window.table).tolist()
        whole = [s for s in sources if "int" in infos[s].dtype]
        sources = whole or [s for s in sources if "float" in infos[s].dtype]
        self._sources |= {*sources}
        if whole:
            sources = whole[-1:]  # a decoder receives its tokens after those of the encoder
        if len(sources) != 1:
            return
        kind = "int" if whole else "float"
        goals = [s for s in target_slots(window.table).tolist() if kind in infos[s].dtype]
        for row in read_rows(window).tolist() if goals else ():
            x = values_of(window, row, sources[0])
            if x is None or x.ndim not in ((2,) if whole else (2, 3)) or x.shape[1] < 3:
                continue
            for goal in goals:
                y = values_of(window, row, goal)
                # the last position has no next token, and programs often leave it out
                ends = _is_one_shorter(infos[goal].shape, infos[sources[0]].shape)
                shown = x[:, : x.shape[1] - ends]
                key = sources[0], goal
                per = math.prod(infos[goal].shape) / infos[sources[0]].shape[0]
                part = targets_of_a_part(x, y, per) if y is not None and whole else None
                if part is not None:
                    known = self.tokens.setdefault(key, Tokens(int(window.steps[row])))
                    count_tokens(known, x, part)
                    continue
                if y is None or y.size < shown.size:
                    continue
                y = y.reshape(-1)[: shown.size].reshape(shown.shape)
                if ends:
                    y = np.concatenate([y, np.full_like(x[:, :1], -1 if whole else np.nan)], 1)
                known = self.tokens.setdefault(key, Tokens(int(window.steps[row])))
                count_tokens(known, x, y, whole=bool(whole))

    @property
    def several(self) -> bool:
        """Whether there are other inputs, such as those of an encoder, of which all is visible."""
        return len(self._sources) > 1

    def shape(self, table: SlotTable, *, least: int) -> tuple[int, ...] | None:
        """Return the shape of the input, [batch, positions, ...], if targets are its next tokens.

        At least `least` targets are compared, and 99% of those that have a next token equal it.
        """
        for (source, _), known in self.tokens.items():
            shape = table.infos[source].shape
            varied = len(known.values) > 2 and known.same < 0.9 * known.count
            if known.count >= least and known.next_ >= self._NEXT * known.ahead and varied:
                return shape
        return None


def targets_of_a_part(
    x: NDArray[np.float64], y: NDArray[np.float64], per: float
) -> NDArray[np.float64] | None:
    """Return targets of the first or last positions as [samples, all positions].

    A loss may leave out the positions that cannot be predicted. The others, and the last one that
    has a target, are -1, as nothing is known about them. None if the targets are no such part, or
    if they are the last tokens and only a few are left out, because the positions before may have
    to predict them (several tokens ahead).

    Args:
        x: the input [samples, positions].
        y: the recorded targets of these samples.
        per: number of targets of a sample.
    """
    samples, positions = x.shape
    count = int(per)
    if count != per or not 3 <= count < positions - 1 or y.size < samples * count:
        return None
    y = y.reshape(-1)[: samples * count]
    if positions - count <= _AHEAD and (y.reshape(samples, count) == x[:, -count:]).all():
        return None
    found = []
    for first in (positions - count, 0):
        whole = np.full_like(x, -1)
        whole[:, first : first + count - 1] = y.reshape(samples, count)[:, :-1]
        alike = (whole == x).sum() + (whole[:, :-1] == x[:, 1:]).sum()
        found.append((int(alike), whole))
    return max(found, key=lambda each: each[0])[1]


def _is_one_shorter(target: tuple[int, ...], source: tuple[int, ...]) -> bool:
    """Return whether a target has a position less than an input [batch, positions, ...]."""
    batch, positions, *rest = source
    return math.prod(target) == batch * (positions - 1) * math.prod(rest)
