"""Decide which training steps are recorded: the schedule, by type of execution, and the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from comgra_decl.hooks.schedule.countdown import Countdown

if TYPE_CHECKING:
    from comgra_decl.hooks.schedule.budget import Budget
    from comgra_decl.spec import Spec

TRAIN = "train"
"""The type of a step without labels."""

_OTHERS = "*"
_MAX_TYPES = 256
"""Maximum number of types whose first step is recorded; limited because each step may have a new
label."""


class Plan(Enum):
    """How to treat a step that has not begun yet."""

    WAIT = "nothing"
    WATCH = "decide when the model is called"
    ARM = "capture it, and decide at its end whether to keep it"


class Agenda:
    """Decides before, within and at the end of each training step whether it is recorded.

    If types do not matter, this is decided before a step begins. Otherwise, it is decided when the
    model is called, based on the labels that the step has at that time. If the label of a due type
    is added only later, all following steps are captured until one of them has the label.

    Args:
        spec: the spec of the run.
        budget: limits the cost of recording.
        clock: returns seconds of a monotonic clock.
        before: the previous agenda, if the spec changed during the run.
    """

    def __init__(
        self,
        spec: Spec,
        budget: Budget,
        *,
        clock: Callable[[], float] = time.monotonic,
        before: Agenda | None = None,
    ) -> None:
        self._keep = spec.keep is not None
        self._exact = spec.schedule.steps is not None
        self._labelled = spec.types.by is not None and not self._exact
        self._cadences = {} if self._exact else spec.schedule.types
        self._sudden = 0 if self._exact else spec.schedule.sudden or 0
        self._until = -1  # the last of the steps that are recorded regardless of the schedule
        self._extended = -1  # the last of them that may be replayed
        self._hurried = spec.schedule.seconds is not None
        self._budget = budget
        self._all = Countdown(spec.schedule, clock=clock, factor=budget.factor)
        self._own: dict[str, Countdown | None] = {}  # for types with their own cadence
        self._clock = clock
        self._step = 0
        self.labels: dict[str, None] = {}  # of the current step, in order
        self.ended: list[str] = []  # labels of the step that ended last
        self._counts: dict[str, int] = {}  # steps of each type, excluding the current one
        self._seen: set[str] = set()  # types that have a record
        self._missed: dict[str, None] = {}  # types that occurred but have no record
        self._late: set[str] = set()  # labels that arrive too late to start capturing
        if before is not None:
            self._go_on_from(before)

    def _go_on_from(self, before: Agenda) -> None:
        self._step, self.labels, self._late = before._step, before.labels, before._late
        self._until, self._extended = before._until, before._extended
        self._seen, self._missed = before._seen, before._missed
        for label, count in before._counts.items():
            self._counts[label] = count
            own = self._own_of(label)
            if own is not None:
                own.recorded(count - 1)
        self._all.recorded(self._step - 1)

    def resume(self, step: int) -> None:
        """Resume training at `step`. That step is recorded regardless of the schedule."""
        self._step = step
        self._all.recorded(step - 1)
        self._all.next = step

    # -- before a step -------------------------------------------------------------------------

    @property
    def typed(self) -> bool:
        """Whether labels affect the decision or have to be counted."""
        return bool(self._labelled or self._cadences or self._missed or self.labels)

    def alarm(self, step: int) -> tuple[int, int] | None:
        """Record the steps from `step` on after a sudden loss, regardless of the schedule.

        Returns:
            The first and the last of these steps; None if the spec requests none.
        """
        if not self._sudden:
            return None
        self._until = step + self._sudden - 1
        return step, self._until

    def extend(self, steps: int) -> None:
        """Record the next steps after the current one, regardless of the schedule."""
        self._extended = max(self._extended, self._step + steps)
        self._until = max(self._until, self._extended)

    @property
    def extra(self) -> bool:
        """Whether the current step is recorded only because of `extend`."""
        if self._step > self._extended:
            return False
        return not any(self._due_for(label) for label in self.labels or (TRAIN,))

    def stop_keeping(self) -> None:
        """Stop capturing steps for triggers; afterwards only due steps are captured."""
        self._keep = False

    @property
    def quiet_until(self) -> float:
        """The first step for which `plan` must be called."""
        if self._keep or self.typed or self._hurried or self._step < self._until:
            return -math.inf
        paid = self._step + self._budget.steps_in_debt
        if self._all.forced is not None:
            paid = min(paid, self._all.forced)  # regardless of cost
        return max(math.inf if self._all.next is None else self._all.next, paid)

    def plan(self, step: int) -> Plan:
        """Return how to treat `step`, which is about to begin."""
        self._step = step
        if self._keep:
            return Plan.ARM
        if self._budget.exhausted():
            return Plan.WAIT
        if not self.typed:
            if step <= self._until:
                return Plan.ARM
            return Plan.ARM if self._due_by_number else Plan.WAIT
        if any(self._due_for(label) for label in self._late):
            return Plan.ARM
        if self._labelled or self._due_by_number or self._missed or step <= self._until:
            return Plan.WATCH
        known = {*self._cadences, *self._counts, TRAIN} - {_OTHERS}
        return Plan.WATCH if any(self._due_for(label) for label in known) else Plan.WAIT

    # -- within a step -------------------------------------------------------------------------

    def declare(self, names: Iterable[str]) -> None:
        """Set the type of the current step to the first of `names`, overriding its tags."""
        self.labels = {**dict.fromkeys(names), **self.labels}

    def tag(self, names: Iterable[str], *, too_late: bool) -> None:
        """Add labels to the current step; `too_late` if the step is not being captured."""
        for name in names:
            self.labels[name] = None
            if too_late and self._due_for(name):
                self._late.add(name)

    @property
    def due(self) -> bool:
        """Whether the current step should be recorded, given its labels so far."""
        labels = self.labels or (TRAIN,)
        if self._budget.exhausted(*labels) or any(self._never(label) for label in labels):
            return False
        if self._step <= self._until:
            return True
        if not self._budget.indebted(*labels):
            return any(self._due_for(label) for label in labels)
        return any(self._explicit_for(label) for label in labels)

    def _explicit_for(self, label: str) -> bool:
        """Whether a step of this type should be recorded regardless of cost."""
        own = self._own_of(label)
        of_its_own = own is not None and own.explicit(self._counts.get(label, 0))
        return of_its_own or self._all.explicit(self._step)

    def _due_for(self, label: str) -> bool:
        if self._budget.exhausted(label):
            return False
        if self._explicit_for(label):
            return True
        if self._budget.indebted(label):
            return False
        own = self._own_of(label)
        if own is not None:
            return own.due(self._counts.get(label, 0)) or self._all.overdue
        return not self._never(label) and (self._is_news(label) or self._all.due(self._step))

    @property
    def _due_by_number(self) -> bool:
        if self._all.explicit(self._step):
            return True
        return self._all.due(self._step) and not self._budget.indebted()

    def _is_news(self, label: str) -> bool:
        """Whether a type has no record yet, so that its next step must be recorded."""
        known = label in self._seen or label == TRAIN or self._exact
        return not known and len(self._seen) < _MAX_TYPES

    def _never(self, label: str) -> bool:
        named = label if label in self._cadences else _OTHERS
        return named in self._cadences and self._cadences[named] is None

    def _own_of(self, label: str) -> Countdown | None:
        """Return the countdown for steps of this type, if the spec sets a cadence for it."""
        if label not in self._own:
            cadence = self._cadences.get(label, self._cadences.get(_OTHERS))
            self._own[label] = None
            if cadence is not None:
                factor = partial(self._budget.factor, label)
                self._own[label] = Countdown(cadence, clock=self._clock, factor=factor)
        return self._own[label]

    # -- at its end ----------------------------------------------------------------------------

    def end(self, *, recorded: bool) -> None:
        """End the current step and update the counts of its types."""
        labels = self.ended = [*self.labels] or [TRAIN]
        self.labels = {}
        general = [self._count(label, recorded=recorded) for label in labels]
        if recorded and any(general):
            self._all.recorded(self._step)
        elif recorded:
            self._all.touched(self._step)

    def _count(self, label: str, *, recorded: bool) -> bool:
        """Count a step of one type; return whether the general schedule applies to that type."""
        own, count = self._own_of(label), self._counts.get(label, 0)
        if own is not None:
            self._counts[label] = count + 1
            if recorded:
                own.recorded(count)
        elif recorded:
            self._seen.add(label)
            self._missed.pop(label, None)
        elif self._is_news(label) and not self._never(label):
            self._missed[label] = None
        return own is None
