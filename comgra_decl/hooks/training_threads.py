"""Threads that train side by side: each has steps of its own, and one at a time is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from comgra_decl.hooks.other_threads import alive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from comgra_decl.hooks.hand_updates import HandUpdates
    from comgra_decl.hooks.scalars.scalars import Saying
    from comgra_decl.hooks.step_clock import StepClock

_PATIENCE = 4
"""Steps of a thread for which it leaves a record to another one whose turn it is."""

_STALE = 1000
"""Steps of other threads after which a record that one has begun is given up."""

IN_TURNS = (
    "several threads train: each has steps of its own, numbered in the order in which they end; "
    "one step is recorded at a time, and the threads take turns"
)


@dataclass(eq=False)
class Lane:
    """The steps of one thread.

    Attributes:
        thread: which one; 0 while nobody has trained.
        clock: tells its steps apart.
        hand: likewise, where no optimizer of torch does.
        saying: what was said of its step in progress.
        labels: of that step.
        record: its step that was recorded last.
        waited: steps of its own since it began to leave a record to another thread.
        waits: whether others still leave a record to it; not, once they have done so in vain.
        calls: whether it was seen to call a model; None: nobody has looked.
        helper: another one that calls `backward` for it; 0: none does.
    """

    thread: int
    clock: StepClock
    hand: HandUpdates
    saying: Saying
    labels: dict[str, None] = field(default_factory=dict)
    record: int = -1
    waited: int = 0
    waits: bool = True
    calls: bool | None = None
    helper: int = 0


class Lanes:
    """The threads that train, and which of them is followed.

    Args:
        first: that of the thread that trains first.

    Attributes:
        followed: the one whose step is recorded, or that has done something last.
        owed: whether a record is due that the followed one was not given.
        passed: steps of others that ended since the followed one began the step in progress.
        refused: how often another one would have begun the record that this one has not begun.
    """

    def __init__(self, first: Lane) -> None:
        self._all = [first]
        self.followed = first
        self.owed = False
        self.passed = 0
        self.refused = 0

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._all)

    @property
    def several(self) -> bool:
        """Whether more than one thread trains."""
        return len(self._all) > 1

    def of(self, thread: int) -> Lane | None:
        """Returns that of a thread; None if it was not seen to train."""
        return next((lane for lane in self._all if lane.thread == thread), None)

    def add(self, lane: Lane) -> None:
        """Another thread trains."""
        self._all.append(lane)

    def prune(self) -> list[Lane]:
        """Forgets threads that have ended, and returns theirs."""
        threads = alive()
        gone = [x for x in self._all if x is not self.followed and x.thread not in threads]
        self._all = [lane for lane in self._all if lane not in gone]
        return gone

    @property
    def stale(self) -> bool:
        """Whether a record that the followed thread has begun is not waited for any longer."""
        gone = self.followed.thread not in alive()
        return gone or self.passed >= _STALE

    def tired(self) -> bool:
        """Whether another thread, whose step ends, takes over the record that has not begun yet."""
        self.refused += 1
        return self.refused > _PATIENCE * len(self._all)

    def leaves(self) -> bool:
        """Whether the followed thread leaves the record that is due to one whose turn it is."""
        mine = self.followed
        older = [lane for lane in self._all if lane.record < mine.record and lane.waits]
        if older and mine.waited < _PATIENCE:
            mine.waited += 1
            return True
        for lane in older:
            lane.waits = False
        mine.waited = 0
        return False
