"""Which steps are stored, once it is known what happened after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Entry(Generic[T]):
    """A step of which it is open whether it is stored.

    Attributes:
        step: its number; entries come in ascending order (an evaluation has its step's number).
        scheduled: stored in any case.
        payload: what would be stored.
        nbytes: bytes of that.
        reasons: why it is kept, if it is.
    """

    step: int
    scheduled: bool
    payload: T
    nbytes: int = 0
    reasons: list[str] = field(default_factory=list)


class Ring(Generic[T]):
    """Holds the latest steps back until no trigger can ask for them any more.

    Entries leave in the order in which they came, so that records stay in ascending order: a
    scheduled one waits for those before it.

    Args:
        before: so many steps before the one at which a trigger fires are kept.
        after: so many steps after it are kept.
        at_most: so many entries that are not scheduled are kept at all; None for no limit. Where it
            runs out, the step itself comes first, then those nearest to it.
        patient: hold scheduled entries back, too, so that it is known of each whether it is kept.
    """

    def __init__(
        self, *, before: int, after: int, at_most: int | None, patient: bool = False
    ) -> None:
        self._before, self._after = before, after
        self._left = at_most
        self._patient = patient
        self._until = -1
        self._cause = ""
        self.pending: deque[Entry[T]] = deque()
        """Those held back, oldest first."""

    @property
    def exhausted(self) -> bool:
        """Whether no more entries can be kept."""
        return self._left == 0

    def push(self, entry: Entry[T], fired: list[str]) -> list[Entry[T]]:
        """Takes the next step and the reasons for which it is kept; returns those to store now."""
        if fired:
            self._fire(entry, fired)
        elif entry.step <= self._until:
            self._keep(entry, [self._cause])
        self.pending.append(entry)
        return self._leaving(entry.step + 1 - self._before)

    def flush(self) -> list[Entry[T]]:
        """Returns what is stored of those held back when no step follows."""
        return self._leaving(None)

    def shrink(self, nbytes: int) -> tuple[list[Entry[T]], int]:
        """Gives up the oldest until at most so many bytes are held.

        Returns:
            Those of them to store now, and the number of those given up.
        """
        total, stored, lost = sum(entry.nbytes for entry in self.pending), [], 0
        while self.pending and total > nbytes:
            entry = self.pending.popleft()
            total -= entry.nbytes
            if entry.scheduled or entry.reasons:
                stored.append(entry)
            else:
                lost += 1
        return stored, lost

    def _fire(self, entry: Entry[T], fired: list[str]) -> None:
        at = f"{', '.join(_short(fired))} at {entry.step}"
        self._keep(entry, fired)
        for earlier in reversed(self.pending):
            if earlier.step >= entry.step - self._before:
                self._keep(earlier, [f"before {at}"])
        if self._after:
            self._until, self._cause = entry.step + self._after, f"after {at}"

    def _keep(self, entry: Entry[T], reasons: Iterable[str]) -> None:
        if not (entry.scheduled or entry.reasons) and self._left is not None:
            if not self._left:
                return
            self._left -= 1
        entry.reasons += reasons

    def _leaving(self, first: int | None) -> list[Entry[T]]:
        """Takes out what no trigger at a step that is still to come can reach.

        `first` is the earliest step that the next one can reach, None if there is no next one.
        """
        stored: list[Entry[T]] = []
        while self.pending:
            entry = self.pending[0]
            out_of_reach = first is None or entry.step < first or self.exhausted
            wanted = bool(entry.reasons) or entry.scheduled
            at_once = bool(entry.reasons) or (entry.scheduled and not self._patient)
            if not (out_of_reach or at_once):
                break
            self.pending.popleft()
            if wanted:
                stored.append(entry)
        return stored


def _short(reasons: Iterable[str]) -> list[str]:
    """Returns the names of the triggers, without what they say of this step."""
    return list(dict.fromkeys(reason.partition(":")[0] for reason in reasons))
