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
        seen: whether the rules of the run have looked at it.
    """

    step: int
    scheduled: bool
    payload: T
    nbytes: int = 0
    reasons: list[str] = field(default_factory=list)
    seen: bool = False

    @property
    def wanted(self) -> bool:
        """Whether it is stored, as far as is known."""
        return self.scheduled or bool(self.reasons)


@dataclass(slots=True)
class Allowance:
    """So many entries that are not scheduled may still be kept; None: as many as there are."""

    left: int | None


class Ring(Generic[T]):
    """Holds the latest steps back until nobody can ask for them any more.

    Entries leave in the order in which they came, so that records stay in ascending order: a
    scheduled one waits for those before it.

    Args:
        before: so many steps before the one at which something happens are kept.
        after: so many steps after it are kept.
        allowance: so many entries that are not scheduled are kept at all. Where it runs out, the
            step itself comes first, then those nearest to it.
        patient: hold scheduled entries back, too, so that it is known of each whether it is kept.
        whole: hand on what is not stored as well, for another ring to decide about again.
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
        """Those held back, oldest first."""

    @property
    def exhausted(self) -> bool:
        """Whether no more entries can be kept."""
        return self._allowance.left == 0

    def push(self, entry: Entry[T], fired: list[str]) -> list[Entry[T]]:
        """Takes the next step and the reasons for which it is kept; returns those to hand on."""
        if fired:
            self._append(entry)
            self.fire(entry, fired)
        else:
            self.add(entry)
        return self.leaving()

    def add(self, entry: Entry[T]) -> None:
        """Takes the next step."""
        if entry.step <= self._until:
            self._keep(entry, [self._cause])
        self._append(entry)

    def _append(self, entry: Entry[T]) -> None:
        self.pending.append(entry)
        self._newest = entry.step

    def fire(self, at: Entry[T], fired: list[str]) -> tuple[int, int] | None:
        """Something happened at a step that is held: it and those around it are kept.

        Returns:
            The first step that is kept, and the step itself; None if that is not kept.
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
        """Returns those that can no longer be asked for when the next step comes, in order."""
        return self._leaving(self._newest + 1 - self._before)

    def flush(self) -> list[Entry[T]]:
        """Returns those held back when no step follows."""
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
        """Takes out what nothing that is still to come can reach.

        `first` is the earliest step that the next one can reach, None if there is no next one.
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
    """Returns the names of the triggers, without what they say of this step."""
    return list(dict.fromkeys(reason.partition(":")[0] for reason in reasons))
