"""A second ring, in which steps that have left the first one wait for the run's rules.

Rules check the steps that the first ring passes on for storing, in order. Steps that would be
dropped wait here for the same time, because a finding may request the steps before it. If a step is
stored only because of such a request, rules never check it, neither during recording nor in a later
diagnosis. Both therefore report the same findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from comgra_decl.keep.ring import Entry, Ring

T = TypeVar("T")


class Request(NamedTuple):
    """A finding's request to keep the steps around `step`; `reason` is stored with them."""

    step: int
    reason: str


class Answer(NamedTuple):
    """The answer to a request.

    `kept`: the first kept step and the step of the finding itself; None if none was kept.
    """

    request: Request
    kept: tuple[int, int] | None


Watch = Callable[[Sequence[Entry[T]]], Sequence[Request]]
"""Passes steps to the rules; returns the requests made by new findings."""


class FindingRing(Generic[T]):
    """Decides whether to store the steps that leave the first ring.

    Args:
        ring: ring of the same length as the first one.
        watch: passes the steps to be stored to the rules.
        answer: called with the result of each request.
    """

    def __init__(self, ring: Ring[T], *, watch: Watch[T], answer: Callable[[Answer], None]) -> None:
        self.ring = ring
        self._watch, self._answer = watch, answer

    def __call__(self, entries: Sequence[Entry[T]]) -> list[Entry[T]]:
        """Add steps that have left the first ring, in order; return steps to store now."""
        self._take(entries)
        return self.ring.leaving()

    def close(self, entries: Sequence[Entry[T]]) -> list[Entry[T]]:
        """Add the last steps; return all remaining steps to store."""
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
        """Keep held steps around the requested one, or the newest if that one has already left."""
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
