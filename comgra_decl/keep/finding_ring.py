"""A second ring behind the first, in which steps wait until the rules of the run have looked.

Rules look at what the first ring hands on to be stored, in order. What it would drop waits here as
long again, because a finding may ask for the steps before it. What is stored for that reason alone
is not shown to the rules, neither now nor by a later diagnosis, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from comgra_decl.keep.ring import Entry, Ring

T = TypeVar("T")


class Request(NamedTuple):
    """A finding that wants steps to be kept: those around `step`, for a `reason` in words."""

    step: int
    reason: str


class Answer(NamedTuple):
    """What a request led to.

    `kept`: the first step that is kept, and the one that stands for the finding; None: none is.
    """

    request: Request
    kept: tuple[int, int] | None


Watch = Callable[[Sequence[Entry[T]]], Sequence[Request]]
"""Shows steps to the rules; returns what new findings ask for."""


class FindingRing(Generic[T]):
    """Decides once more about what leaves the first ring.

    Args:
        ring: as long as the first one.
        watch: shows those that are stored anyhow to the rules.
        answer: told of each request what came of it.
    """

    def __init__(self, ring: Ring[T], *, watch: Watch[T], answer: Callable[[Answer], None]) -> None:
        self.ring = ring
        self._watch, self._answer = watch, answer

    def __call__(self, entries: Sequence[Entry[T]]) -> list[Entry[T]]:
        """Takes what has left the first ring, in order; returns what is stored now."""
        self._take(entries)
        return self.ring.leaving()

    def close(self, entries: Sequence[Entry[T]]) -> list[Entry[T]]:
        """Takes the last ones; returns everything else that is stored."""
        self._take(entries)
        return self.ring.flush()

    def _take(self, entries: Sequence[Entry[T]]) -> None:
        shown = [entry for entry in entries if entry.wanted]
        for entry in shown:
            entry.seen = True
        for entry in entries:
            self.ring.add(entry)
        for request in self._watch(shown):
            self._fulfil(request)

    def _fulfil(self, request: Request) -> None:
        """Keeps what is held around the step, or around the newest one if it has left."""
        at = self._held(request.step)
        kept = None if at is None else self.ring.fire(at, [request.reason])
        self._answer(Answer(request, kept))

    def _held(self, step: int) -> Entry[T] | None:
        held = self.ring.pending
        if not held:
            return None
        if step < held[0].step:
            return held[-1]
        return next((entry for entry in reversed(held) if entry.step <= step), None)
