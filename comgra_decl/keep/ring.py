"""Hold steps until it is decided whether to store them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Entry(Generic[T]):
    """A step that may or may not be stored.

    Attributes:
        step: number of the step, ascending (an evaluation has the number of its step).
        scheduled: whether the schedule stores it in any case.
        payload: data to store.
        nbytes: size of the payload in bytes.
        reasons: reasons to keep it, if any.
        seen: whether the run's rules have checked it.
    """

    step: int
    scheduled: bool
    payload: T
    nbytes: int = 0
    reasons: list[str] = field(default_factory=list)
    seen: bool = False

    @property
    def wanted(self) -> bool:
        """Whether the entry will be stored according to the decisions so far."""
        return self.scheduled or bool(self.reasons)


@dataclass(slots=True)
class Allowance:
    """Number of unscheduled entries that may still be kept; None: no limit."""

    left: int | None


class Ring(Generic[T]):
    """Holds the latest steps until triggers can no longer reach them.

    Entries leave in order of arrival, so that records remain in ascending order. A scheduled entry
    therefore waits for those before it.

    Args:
        before: number of steps to keep before an event.
        after: number of steps to keep after it.
        allowance: number of unscheduled entries to keep in total. If it runs out, the event's step
            has priority, followed by the nearest steps.
        patient: whether scheduled entries are also held until it is decided whether to keep them.
        whole: whether dropped entries are also passed on, for another ring to decide.
    """

    def __init__(
        self,
        *,
        before: int,
        after: int,
        allowance: Allowance,
        patient: bool = False,
        whole: bool = False,
    ) -> None:
        self._before, self._after = before, after
        self._allowance = allowance
        self._patient, self._whole = patient, whole
        self._until = -1
        self._cause = ""
        self._newest = -1
        self.pending: deque[Entry[T]] = deque()
        """Held entries, oldest first."""

    @property
    def exhausted(self) -> bool:
        """Whether no more entries can be kept."""
        return self._allowance.left == 0

    def push(self, entry: Entry[T], fired: list[str]) -> list[Entry[T]]:
        """Add the next step with any reasons to keep it; return the entries to pass on."""
        if fired:
            self._append(entry)
            self.fire(entry, fired)
        else:
            self.add(entry)
        return self.leaving()

    def add(self, entry: Entry[T]) -> None:
        """Add the next step."""
        if entry.step <= self._until:
            self._keep(entry, [self._cause])
        self._append(entry)

    def _append(self, entry: Entry[T]) -> None:
        self.pending.append(entry)
        self._newest = entry.step

    def fire(self, at: Entry[T], fired: list[str]) -> tuple[int, int] | None:
        """Keep a held step at which a trigger fired, and the steps around it.

        Returns:
            The first kept step and the step itself; None if it is not kept.
        """
        what = f"{', '.join(_short(fired))} at {at.step}"
        place = next(i for i, entry in enumerate(self.pending) if entry is at)
        held = [*self.pending]
        before = [e for e in held[:place] if e.step >= at.step - self._before]
        after = [e for e in held[place + 1 :] if e.step <= at.step + self._after]
        self._keep(at, fired)
        for entry in reversed(before):
            self._keep(entry, [f"before {what}"])
        for entry in after:
            self._keep(entry, [f"after {what}"])
        if self._after:
            self._until, self._cause = at.step + self._after, f"after {what}"
        kept = [entry.step for entry in (*before, at) if entry.wanted]
        return (kept[0], at.step) if at.wanted else None

    def leaving(self) -> list[Entry[T]]:
        """Return the entries that no trigger can reach once the next step arrives, in order."""
        return self._leaving(self._newest + 1 - self._before)

    def keep_held(self, reason: str) -> None:
        """Keep all held entries."""
        for entry in self.pending:
            self._keep(entry, [reason])

    def flush(self) -> list[Entry[T]]:
        """Return the held entries; no step may follow."""
        return self._leaving(None)

    def shrink(self, nbytes: int) -> tuple[list[Entry[T]], int]:
        """Drop the oldest entries until at most `nbytes` are held.

        Returns:
            The removed entries to store now, and the number of dropped entries.
        """
        total, stored, lost = sum(entry.nbytes for entry in self.pending), [], 0
        while self.pending and total > nbytes:
            entry = self.pending.popleft()
            total -= entry.nbytes
            if entry.wanted:
                stored.append(entry)
            else:
                lost += 1
        return stored, lost

    def _keep(self, entry: Entry[T], reasons: Iterable[str]) -> None:
        allowance = self._allowance
        if not entry.wanted and allowance.left is not None:
            if not allowance.left:
                return
            allowance.left -= 1
        entry.reasons += reasons

    def _leaving(self, first: int | None) -> list[Entry[T]]:
        """Remove entries that no later step can reach.

        `first` is the earliest step that the next step can reach; None if no step follows.
        """
        left: list[Entry[T]] = []
        while self.pending:
            entry = self.pending[0]
            out_of_reach = first is None or entry.step < first or self.exhausted
            at_once = bool(entry.reasons) or (entry.scheduled and not self._patient)
            if not (out_of_reach or at_once):
                break
            self.pending.popleft()
            if entry.wanted or self._whole:
                left.append(entry)
        return left


def _short(reasons: Iterable[str]) -> list[str]:
    """Return the names of the triggers, without step details."""
    return list(dict.fromkeys(reason.partition(":")[0] for reason in reasons))
