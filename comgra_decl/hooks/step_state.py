"""What has happened in the step in progress, and what becomes of it: a state machine without torch.

It is given facts (a model is called, in which mode, with gradients or without) and answers what
they mean for the record of the step. `StepRecords`, `CallRouter` and `Steps` act on the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, NamedTuple

from comgra_decl.hooks.schedule.agenda import Plan

MAX_ROOT_CALLS = 2000
"""Calls of one model that a record has at most, and those of all models after which, without an
optimizer step, it is given up (memory stays bounded)."""

MOST_ASIDE = 8
"""Calls without gradient that a record has at most, and two more for each call with."""


class RootCall(Enum):
    """What a call of a model, or of a part of one, from outside any module is."""

    TRAINING = "gradients flow through it"
    WITHOUT_GRADIENT = "belongs to a step of the training, though no gradient flows through it"
    EVALUATION = "evaluates what is trained"
    UNDECIDED = "nothing is trained yet: a teacher, an evaluation, or a program that trains nothing"


class Stage(Enum):
    """How far the step in progress is from a record."""

    WAITING = "it is only counted"
    WATCHING = "the next call of a model decides whether it is recorded"
    DECLINED = "that call has decided against it, or its record was given up"
    ARMED = "it is captured"


class Room(Enum):
    """Whether the record of a step has room for one more call of a model."""

    FREE = "it has"
    FULL = "it has enough"
    CROWDED = "it has enough calls without gradient of a model in training mode, which is odd"


class Outcome(Enum):
    """What becomes of a captured step that has ended."""

    RECORD = "it is recorded"
    EVALUATION = "all that was called in it was an evaluation, which is recorded as such"
    EMPTY = "nothing was called in it"
    DROPPED = "its labels say that it is not recorded"


class Call(NamedTuple):
    """The call of a model from outside any module.

    Attributes:
        model: stands for the model, here only to tell models apart.
        kind: what it is, as far as modes of modules tell.
        parametric: whether the model has parameters (a loss has none).
        gradient: whether gradients can flow.
        training_mode: whether the model is in training mode.
    """

    model: Hashable
    kind: RootCall
    parametric: bool = True
    gradient: bool = True
    training_mode: bool = True


class StepState:
    """The state of the step in progress.

    Args:
        counted: returns how many steps have ended since `number` was last set, of which nobody
            has told this.

    Attributes:
        stage: how far the step is from a record.
        armed: whether it is captured: whether that is its stage.
        open: whether its record takes calls. Not once that is closed early: what was captured
            turned out to be an evaluation, or nobody ended the step.
        deferred: whether it is decided again at its end if it is recorded.
        any_ended: whether any step of this program has been seen to end.
        trained: calls with gradient in the step that was captured last.
        aside: calls without gradient in this step.
        usual: calls with gradient in the captured step before.
        undecided: references to what was called in this step before anything was trained, and
            whether it was in training mode.
        evaluated: references to what was evaluated in this step before that, or with gradients.
        in_training_mode: whether a model was called in training mode in this step.
        tuned_before: whether none was in the last captured step, as far as is known.
    """

    def __init__(self, counted: Callable[[], int] = lambda: 0) -> None:
        self._counted = counted
        self._begun = 0
        self._watched = False  # whether this step was to be decided about when a model is called
        self._calls: Counter[Hashable] = Counter()
        self.stage = Stage.WAITING
        self.armed = False
        self.open = False
        self.deferred = False
        self.any_ended = False
        self.trained = self.aside = self.usual = 0
        self.undecided: list[tuple[Callable[[], Any], bool]] = []
        self.evaluated: list[Callable[[], Any]] = []
        self.in_training_mode, self.tuned_before = False, True

    @property
    def number(self) -> int:
        """The number of the step in progress, which is how many have ended."""
        return self._begun + self._counted()

    @number.setter
    def number(self, number: int) -> None:
        self._begun = number - self._counted()

    @property
    def begun(self) -> bool:
        """Whether a model was called in the step that is captured."""
        return self.open and bool(self.trained or self.aside)

    def count_from_here(self) -> int:
        """What `counted` returns begins again at nothing; returns the number."""
        self._begun = number = self.number
        return number

    # -- a step begins -------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """A step begins that is not captured as yet; `Plan.ARM` is for `arm`."""
        self._watched = plan is Plan.WATCH
        if plan is not Plan.ARM:
            self.stage = Stage.WATCHING if self._watched else Stage.WAITING
            self.armed = self.open = False

    def arm(self) -> None:
        """The step is captured from now on."""
        self.stage = Stage.ARMED
        self.armed = True
        self.reopen()

    def reopen(self) -> None:
        """What was called until now is no part of the step, whose capture begins again."""
        self.open = True
        self.trained = 0
        self._calls.clear()

    def close(self) -> None:
        """The record of the step takes no more calls; the step goes on."""
        self.open = False

    def disarm(self) -> None:
        """The step is captured no longer."""
        self.armed = self.open = False
        if self.stage is Stage.ARMED:
            self.stage = Stage.DECLINED if self._watched else Stage.WAITING

    def decide(self, *, due: bool) -> bool:
        """The call of a model decides; returns whether the step is to be armed."""
        if self.stage is not Stage.WATCHING:
            return False
        if not due:
            self.stage = Stage.DECLINED
        return due

    def reconsider(self) -> None:
        """The next call of a model decides again, if one was to decide about this step."""
        if self._watched and self.stage is Stage.DECLINED:
            self.stage = Stage.WATCHING

    # -- a model is called ---------------------------------------------------------------------

    def kind(self, call: Call, *, backward: bool, stepped: bool) -> RootCall:
        """Returns what a call is, by what has happened until now.

        What looks like an evaluation may be a step of fine-tuning in that mode, if gradients can
        flow, and nothing else was called in this step, or `backward` never yet: it will tell.

        Args:
            call: what is called.
            backward: whether `backward` was called in this step.
            stepped: whether any optimizer has been seen to step.
        """
        if call.kind is RootCall.UNDECIDED and not self.open:
            return RootCall.EVALUATION
        if call.kind is not RootCall.EVALUATION:
            return call.kind
        may_train = call.gradient and call.parametric and self.open
        if may_train and (not (backward or stepped) or not self.trained):
            self.trained = 0  # of a network that is called while it is being built
            return RootCall.UNDECIDED
        return RootCall.EVALUATION

    def is_endless(self, *, backward: bool) -> bool:
        """Whether no end of this step can be seen though it is trained in, again and again."""
        return self.open and backward and not self.any_ended and self.trained >= MAX_ROOT_CALLS

    def room(self, call: Call, *, evaluation: int) -> Room:
        """Counts a call of a model; returns whether the record has room for it.

        Args:
            call: what is called; no evaluation.
            evaluation: calls that the record of an evaluation would have.
        """
        if not self.open:
            return Room.FULL
        self._calls[call.model] += 1
        if self._calls[call.model] > MAX_ROOT_CALLS:
            return Room.FULL
        if call.kind is RootCall.TRAINING:
            return Room.FREE
        if call.kind is RootCall.UNDECIDED:  # as many as of an evaluation, which it may be
            may_train = call.training_mode or (call.gradient and not self.usual)
            most = max(evaluation, MOST_ASIDE if may_train else 0)
            return Room.FREE if self.aside < most else Room.FULL
        if self.aside < MOST_ASIDE + 2 * self.trained:
            return Room.FREE
        return Room.CROWDED if call.training_mode and call.parametric else Room.FULL

    def take(self, call: Call, reference: Callable[[], Any]) -> None:
        """A call becomes part of the step; `reference` leads to the model as long as it lives."""
        if call.kind is RootCall.TRAINING:
            self.trained += call.parametric
        else:
            self.aside += call.parametric
        if call.kind is RootCall.UNDECIDED and call.parametric:
            self.undecided.append((reference, call.training_mode))

    # -- what is called turns out to be ---------------------------------------------------------

    @property
    def is_only_undecided(self) -> bool:
        """Whether what was called may have been an evaluation, and nothing was trained since."""
        return bool(self.undecided) and not self.trained

    def tunes(self) -> None:
        """`backward` was called on what was undecided: it is trained, in evaluation mode."""
        self.trained, self.aside = self.aside, 0
        self.undecided.clear()

    def evaluates(self) -> None:
        """What was undecided is recorded as an evaluation."""
        self.undecided.clear()
        self.aside = 0

    # -- a step ends ---------------------------------------------------------------------------

    def outcome(self, *, due: bool, kept: bool, tensors: int) -> Outcome:
        """Returns what becomes of this step, which was captured and ends now.

        Args:
            due: whether the schedule records it.
            kept: whether it is kept though the schedule does not, to be decided about later.
            tensors: how many were captured.
        """
        if self.is_only_undecided and not all(training for _, training in self.undecided):
            return Outcome.EVALUATION
        if not tensors:
            return Outcome.EMPTY
        return Outcome.RECORD if due or kept else Outcome.DROPPED

    def end(self, *, steps: int = 1) -> None:
        """The step has ended, and the next one has the number after its own.

        Args:
            steps: how many have; more than one, if steps of other threads have ended meanwhile.
        """
        self._begun += steps
        self.forget_calls()
        self.in_training_mode = False

    def forget_calls(self) -> None:
        """What was called until now belongs to another step."""
        self.aside = 0
        self.undecided.clear()
        self.evaluated.clear()
