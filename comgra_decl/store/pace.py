"""Decide when the writer thread commits, based only on times and counts."""

from __future__ import annotations

import math
from typing import NamedTuple

NUMBERS_PATIENCE = 5.0
"""Number of seconds that logged values wait for a record to be committed."""

_NUMBERS_SHARE, _NUMBERS_LONGEST = 0.01, 20.0  # longer in long runs: a separate commit takes 4 kB
_BLOCK_PATIENCE = 3.0  # maximum seconds that records wait for a block to be completed
_STRETCH, _LONGEST_INTERVAL = 0.005, 10.0  # share of the elapsed time; limits the files


class Backlog(NamedTuple):
    """The data available to the next commit.

    Attributes:
        committed: number of records already in the run.
        ready: number of reduced records that wait for the next commit.
        queued: number of steps not reduced yet.
        block: records per block; None if the run has no blocks.
        numbers_since: arrival time of the first waiting logged value; None if none are waiting.
    """

    committed: int
    ready: int
    queued: int
    block: int | None = None
    numbers_since: float | None = None


class Pace:
    """Decides when the next commit is due and how many steps it takes.

    Args:
        interval: minimum seconds between commits; 0: commit everything immediately.
        started: start time of the run; all times are seconds of one monotonic clock.
        in_blocks: whether a commit may wait to complete a block. Must be False if steps may be
            dropped or delayed, because the number of future steps is unknown in that case.
    """

    def __init__(self, interval: float, *, started: float, in_blocks: bool = True) -> None:
        self._interval = interval
        self._started = started
        self._in_blocks = in_blocks
        self._due = -math.inf  # the first record is committed immediately
        self._since: float | None = None  # end of the last commit

    def spacing(self, now: float) -> float:
        """Return the minimum number of seconds between two commits, given the elapsed time."""
        if not self._interval:
            return 0.0
        return max(self._interval, min(_LONGEST_INTERVAL, _STRETCH * (now - self._started)))

    def committed(self, now: float) -> None:
        """Start the wait for the next commit."""
        self._since = now
        self.postpone(now)

    def postpone(self, now: float) -> None:
        """Postpone a commit that would store no data."""
        self._due = now + self.spacing(now)

    def pause(self, now: float, backlog: Backlog) -> float:
        """Return the seconds until the next commit is due (<= 0: now, inf: no data is waiting)."""
        return min(self._pause_of_numbers(now, backlog), self._pause_of_records(now, backlog))

    def share(self, backlog: Backlog) -> int:
        """Return how many of the queued steps the next commit takes.

        A fast run fills whole blocks between two commits. If the commit ends at the end of a block,
        the remaining records wait for the next commit and are not stored twice, as rows now and in
        a block later.
        """
        block = backlog.block
        waiting = backlog.ready + backlog.queued
        if block is None or waiting < block or not self._in_blocks:
            return backlog.queued
        whole = (backlog.committed + waiting) // block * block
        return max(0, whole - backlog.committed - backlog.ready)

    def _pause_of_numbers(self, now: float, backlog: Backlog) -> float:
        if backlog.numbers_since is None:
            return math.inf
        patience = min(_NUMBERS_LONGEST, _NUMBERS_SHARE * (now - self._started))
        return max(self._due, backlog.numbers_since + max(NUMBERS_PATIENCE, patience)) - now

    def _pause_of_records(self, now: float, backlog: Backlog) -> float:
        block, waiting = backlog.block, backlog.ready + backlog.queued
        if not waiting:
            return math.inf
        left = self._due - now
        if left > 0 or not self._interval or not self._in_blocks or self._since is None:
            return left
        if block is None or waiting >= block:
            return left
        missing = -(backlog.committed + waiting) % block
        waited = now - self._since
        rest = missing * waited / waiting  # at the pace observed since the last commit
        return rest if waited + rest <= _BLOCK_PATIENCE else 0.0
