"""The state of the step in progress, as a state machine that does not depend on torch.

It receives facts (a model is called, in which mode, with or without gradients) and determines their
meaning for the record of the step. `StepRecords`, `CallRouter` and `Steps` act on the decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, NamedTuple

from comgra_decl.hooks.schedule.agenda import Plan

MAX_ROOT_CALLS = 2000
"""The maximum number of recorded calls per model. A record without an optimizer step is closed
after the same number of calls with gradients, so that memory use is bounded."""

MOST_ASIDE = 8
"""The maximum number of recorded calls without gradients, plus two for each call with gradients."""


class RootCall(Enum):
    """The kind of a model call, of the whole model or a part, from outside any module."""

    TRAINING = "gradients flow through it"
    WITHOUT_GRADIENT = "part of a training step, although no gradient flows through it"
    EVALUATION = "evaluates a trained model"
    UNDECIDED = "before any training: a teacher, an evaluation, or a program without training"


class Stage(Enum):
    """The recording stage of the step in progress."""

    WAITING = "only counted"
    WATCHING = "the next model call decides whether it is recorded"
    DECLINED = "a model call decided against recording it, or its record was dropped"
    ARMED = "captured"


class Room(Enum):
    """Whether the record of a step accepts another model call."""

    FREE = "accepts the call"
    FULL = "has enough calls"
    CROWDED = "has enough calls without gradients; unusual for a model in training mode"


class Outcome(Enum):
    """The outcome of a captured step that has ended."""

    RECORD = "recorded"
    EVALUATION = "recorded as an evaluation, because all of its calls were one"
    EMPTY = "no model was called"
    DROPPED = "not recorded, because of its labels"


class Call(NamedTuple):
    """A model call from outside any module.

    Attributes:
        model: an identifier of the model.
        kind: the kind of the call, as far as it can be told from the modes of modules.
        parametric: whether the model has parameters (a loss has none).
        gradient: whether gradients are enabled.
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
        counted: returns how many steps have ended since `number` was last set, in addition to those
            that `end` has reported.

    Attributes:
        stage: the recording stage of the step.
        armed: whether the step is captured, which is the stage `ARMED`.
        open: whether the record accepts calls. False if it was closed early because the captured
            calls were an evaluation, or because the step has no observable end.
        deferred: whether the decision to record the step is made again at its end.
        any_ended: whether any step of this program has ended.
        trained: the number of calls with gradients in the last captured step.
        aside: the number of calls without gradients in this step.
        usual: the number of calls with gradients in the preceding captured step.
        undecided: for each call in this step before any training, a reference to the model and
            whether it was in training mode.
        evaluated: references to the models that were evaluated in this step, either before any
        training or with gradients.
        in_training_mode: whether a model was called in training mode in this step.
        tuned_before: whether no model was called in training mode in the last captured step, as far
            as known.
    """

    def __init__(self, counted: Callable[[], int] = lambda: 0) -> None:
        self._counted = counted
        self._begun = 0
        self._watched = False  # whether the next model call decides about this step
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
        """The number of the step in progress, which is the number of steps that have ended."""
        return self._begun + self._counted()

    @number.setter
    def number(self, number: int) -> None:
        self._begun = number - self._counted()

    @property
    def begun(self) -> bool:
        """Whether a model was called in the step that is captured."""
        return self.open and bool(self.trained or self.aside)

    def count_from_here(self) -> int:
        """Prepare for a reset of `counted` to 0; return the number of the step in progress."""
        self._begun = number = self.number
        return number

    # -- beginning a step ----------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Begin a step according to its plan; with `Plan.ARM`, call `arm` next."""
        self._watched = plan is Plan.WATCH
        if plan is not Plan.ARM:
            self.stage = Stage.WATCHING if self._watched else Stage.WAITING
            self.armed = self.open = False

    def arm(self) -> None:
        """Start capturing the step."""
        self.stage = Stage.ARMED
        self.armed = True
        self.reopen()

    def reopen(self) -> None:
        """Restart capturing the step, without the calls so far."""
        self.open = True
        self.trained = 0
        self._calls.clear()

    def close(self) -> None:
        """Stop accepting calls for the record, although the step continues."""
        self.open = False

    def disarm(self) -> None:
        """Stop capturing the step."""
        self.armed = self.open = False
        if self.stage is Stage.ARMED:
            self.stage = Stage.DECLINED if self._watched else Stage.WAITING

    def decide(self, *, due: bool) -> bool:
        """At a model call, decide whether to record the step; return whether to arm it."""
        if self.stage is not Stage.WATCHING:
            return False
        if not due:
            self.stage = Stage.DECLINED
        return due

    def reconsider(self) -> None:
        """Let the next model call decide again, if this step was left to a model call."""
        if self._watched and self.stage is Stage.DECLINED:
            self.stage = Stage.WATCHING

    # -- model calls ---------------------------------------------------------------------------

    def kind(self, call: Call, *, backward: bool, stepped: bool) -> RootCall:
        """Return the kind of a call, given the state so far.

        What looks like an evaluation may be a fine-tuning step in evaluation mode. This is possible
        if gradients are enabled and this step has no other training call, or if there has been no
        `backward` or optimizer step yet. The call then remains undecided until `backward` is
        called.

        Args:
            call: the call.
            backward: whether `backward` was called in this step.
            stepped: whether any optimizer step has been observed.
        """
        if call.kind is RootCall.UNDECIDED and not self.open:
            return RootCall.EVALUATION
        if call.kind is not RootCall.EVALUATION:
            return call.kind
        may_train = call.gradient and call.parametric and self.open
        if may_train and (not (backward or stepped) or not self.trained):
            self.trained = 0  # any earlier calls were made while building the network
            return RootCall.UNDECIDED
        return RootCall.EVALUATION

    def is_endless(self, *, backward: bool) -> bool:
        """Return whether this step has many training calls but its end cannot be observed."""
        return self.open and backward and not self.any_ended and self.trained >= MAX_ROOT_CALLS

    def room(self, call: Call, *, evaluation: int) -> Room:
        """Count a model call; return whether the record accepts it.

        Args:
            call: the call, which is not an evaluation.
            evaluation: the number of calls that the record of an evaluation would have.
        """
        if not self.open:
            return Room.FULL
        self._calls[call.model] += 1
        if self._calls[call.model] > MAX_ROOT_CALLS:
            return Room.FULL
        if call.kind is RootCall.TRAINING:
            return Room.FREE
        if call.kind is RootCall.UNDECIDED:  # accept as many as for an evaluation, which it may be
            may_train = call.training_mode or (call.gradient and not self.usual)
            most = max(evaluation, MOST_ASIDE if may_train else 0)
            return Room.FREE if self.aside < most else Room.FULL
        if self.aside < MOST_ASIDE + 2 * self.trained:
            return Room.FREE
        return Room.CROWDED if call.training_mode and call.parametric else Room.FULL

    def take(self, call: Call, reference: Callable[[], Any]) -> None:
        """Add a call to the step; `reference` returns the model, or None if it no longer exists."""
        if call.kind is RootCall.TRAINING:
            self.trained += call.parametric
        else:
            self.aside += call.parametric
        if call.kind is RootCall.UNDECIDED and call.parametric:
            self.undecided.append((reference, call.training_mode))

    # -- settling undecided calls ---------------------------------------------------------------

    @property
    def is_only_undecided(self) -> bool:
        """Whether the calls so far may have been an evaluation, with no training call since."""
        return bool(self.undecided) and not self.trained

    def tunes(self) -> None:
        """Count the undecided calls as training calls in evaluation mode."""
        self.trained, self.aside = self.aside, 0
        self.undecided.clear()

    def evaluates(self) -> None:
        """Discard the undecided calls, which are recorded as an evaluation."""
        self.undecided.clear()
        self.aside = 0

    # -- ending a step -------------------------------------------------------------------------

    def outcome(self, *, due: bool, kept: bool, tensors: int) -> Outcome:
        """Return the outcome of the captured step that is ending.

        Args:
            due: whether the schedule records it.
            kept: whether it is kept outside the schedule, to be kept or dropped later.
            tensors: the number of captured tensors.
        """
        if self.is_only_undecided and not all(training for _, training in self.undecided):
            return Outcome.EVALUATION
        if not tensors:
            return Outcome.EMPTY
        return Outcome.RECORD if due or kept else Outcome.DROPPED

    def end(self, *, steps: int = 1) -> None:
        """End the step and advance the step number.

        Args:
            steps: the number of steps that ended; more than one if steps of other threads ended in
                the meantime.
        """
        self._begun += steps
        self.forget_calls()
        self.in_training_mode = False

    def forget_calls(self) -> None:
        """Discard the calls so far, because they belong to another step."""
        self.aside = 0
        self.undecided.clear()
        self.evaluated.clear()
