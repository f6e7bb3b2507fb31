"""The state of a step: any sequence of events preserves what records rely on, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from comgra_decl.hooks import step_state
from comgra_decl.hooks.schedule.agenda import Plan
from comgra_decl.hooks.step_state import (
    MAX_ROOT_CALLS,
    MOST_ASIDE,
    Call,
    Outcome,
    Room,
    RootCall,
    Stage,
    StepState,
)

calls = st.builds(
    Call,
    model=st.integers(0, 2),
    kind=st.sampled_from(RootCall),
    parametric=st.booleans(),
    gradient=st.booleans(),
    training_mode=st.booleans(),
)


@dataclass
class Ended:
    """A step that has ended.

    Attributes:
        number: its number.
        plan: its plan.
        due: whether a call has decided to record it; None: no call has decided.
        outcome: its outcome; None: it was not captured when it ended.
    """

    number: int
    plan: Plan
    due: bool | None
    outcome: Outcome | None


@dataclass
class Step:
    """What an observer, who only counts, knows about the step in progress."""

    plan: Plan
    due: bool | None = None
    given_up: bool = False
    trained: int = 0
    aside: int = 0
    evaluated: int = 0
    models: Counter[Any] = field(default_factory=Counter)


class Steps(RuleBasedStateMachine):
    """Plays events in any order in which `Steps` and `CallRouter` may send them."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0
        self.state = StepState(lambda: self.counted)
        self.step = Step(Plan.WAIT)
        self.backward = False
        self.ended: list[Ended] = []
        self._begin(Plan.WAIT)

    def _begin(self, plan: Plan) -> None:
        self.step = Step(plan)
        self.backward = False
        if plan is not Plan.ARM and self.state.armed:
            self.state.disarm()
        self.state.begin(plan)
        if plan is Plan.ARM:
            self.state.arm()

    # -- events --------------------------------------------------------------------------------

    @rule(due=st.booleans())
    def a_watched_call_decides(self, due: bool) -> None:
        watching = self.state.stage is Stage.WATCHING
        armed = self.state.decide(due=due)
        assert armed == (watching and due)
        if watching:
            self.step.due = due
        if armed:
            self.state.arm()
            self.step.trained = 0
            self.step.models.clear()

    @rule()
    def a_call_is_waited_for_once_more(self) -> None:
        self.state.reconsider()

    @rule(call=calls)
    def a_model_is_called(self, call: Call) -> None:
        state = self.state
        before = state.trained, state.aside
        kind = state.kind(call, backward=self.backward, stepped=bool(self.ended))
        if kind is RootCall.EVALUATION:
            self.step.evaluated += 1
            assert (state.trained, state.aside) == before, "an evaluation is no part of the step"
            return
        if kind is RootCall.UNDECIDED and call.kind is RootCall.EVALUATION:
            self.step.trained = 0  # a network that was called while it was being built
        call = call._replace(kind=kind)
        if state.room(call, evaluation=1) is not Room.FREE:
            return
        assert state.open
        state.take(call, lambda: None)
        self.step.models[call.model] += 1
        if call.parametric and kind is RootCall.TRAINING:
            self.step.trained += 1
        elif call.parametric:
            self.step.aside += 1

    @rule()
    def backward_is_called(self) -> None:
        if self.state.is_only_undecided:
            self.state.tunes()
            self.step.trained, self.step.aside = self.step.aside, 0
        self.backward = True

    @precondition(lambda self: self.state.open and self.state.undecided)
    @rule()
    def what_was_undecided_was_an_evaluation(self) -> None:
        self.state.evaluates()
        self.state.reopen()
        self.step.aside = self.step.trained = 0
        self.step.models.clear()

    @rule()
    def the_record_is_given_up(self) -> None:
        self.step.given_up = self.step.given_up or self.state.armed
        self.state.disarm()

    @rule(steps=st.integers(1, 50))
    def steps_end_that_are_only_counted(self, steps: int) -> None:
        if self.state.stage is Stage.WAITING:
            first = self.state.number
            self.counted += steps
            self.ended += [Ended(first + i, Plan.WAIT, None, None) for i in range(steps)]
            self.state.count_from_here()
            self.counted = 0

    @rule(plan=st.sampled_from(Plan), kept=st.booleans(), labels_due=st.booleans())
    def a_step_ends(self, plan: Plan, kept: bool, labels_due: bool) -> None:
        state, step, outcome = self.state, self.step, None
        if state.armed:
            due = labels_due if state.deferred else True
            tensors = sum(step.models.values())
            outcome = state.outcome(due=due, kept=kept, tensors=tensors)
            if outcome is Outcome.RECORD:
                assert due or kept
                assert tensors
            elif outcome is Outcome.DROPPED:
                assert not due
                assert not kept
            elif outcome is Outcome.EMPTY:
                assert not tensors
            else:
                assert not state.trained, "what trains is no evaluation"
            state.close()
        self.ended.append(Ended(state.number, step.plan, step.due, outcome))
        state.end()
        state.deferred = labels_due
        self._begin(plan)
        assert (state.aside, state.undecided, state.evaluated) == (0, [], [])

    @rule(others=st.integers(1, 4))
    def steps_of_other_threads_have_numbers_too(self, others: int) -> None:
        if not self.state.armed:
            first = self.state.number
            self.state.end(steps=others)
            self.ended += [Ended(first + i, Plan.WAIT, None, None) for i in range(others)]
            self._begin(Plan.WAIT)

    # -- invariants -----------------------------------------------------------------------------

    @invariant()
    def no_step_is_counted_twice_or_left_out(self) -> None:
        assert [step.number for step in self.ended] == [*range(self.state.number)]

    @invariant()
    def a_step_is_captured_exactly_if_it_is_planned_or_decided(self) -> None:
        step = self.step
        decided = step.plan is Plan.ARM or (step.plan is Plan.WATCH and step.due is True)
        assert self.state.armed == (decided and not step.given_up) or step.given_up
        for ended in self.ended:
            if ended.outcome is not None:
                assert ended.plan is Plan.ARM or ended.due

    @invariant()
    def nothing_is_taken_outside_of_a_captured_step(self) -> None:
        if not self.state.armed:
            assert not self.state.open
            assert not self.state.begun
        if not self.state.open:
            room = self.state.room(Call(0, RootCall.TRAINING), evaluation=99)
            assert room is Room.FULL

    @invariant()
    def the_counts_are_those_of_the_calls_that_were_taken(self) -> None:
        if self.state.open:
            assert self.state.trained == self.step.trained
            assert self.state.aside == self.step.aside


TestSteps = Steps.TestCase


# -- limits ---------------------------------------------------------------------------------------


def armed() -> StepState:
    state = StepState()
    state.begin(Plan.ARM)
    state.arm()
    return state


def take(state: StepState, call: Call, *, evaluation: int = 1) -> Room:
    room = state.room(call, evaluation=evaluation)
    if room is Room.FREE:
        state.take(call, lambda: None)
    return room


TRAINS = Call("net", RootCall.TRAINING)
BESIDE = Call("teacher", RootCall.WITHOUT_GRADIENT, gradient=False, training_mode=False)


def test_a_record_has_two_thousand_calls_of_one_model_at_most_and_room_for_another() -> None:
    state = armed()
    assert {take(state, TRAINS) for _ in range(MAX_ROOT_CALLS)} == {Room.FREE}
    assert take(state, TRAINS) is Room.FULL
    assert state.trained == MAX_ROOT_CALLS == 2000
    assert take(state, TRAINS._replace(model="other")) is Room.FREE


def test_two_thousand_calls_without_an_optimizer_step_are_a_step_that_nobody_ends() -> None:
    state = armed()
    for _ in range(MAX_ROOT_CALLS - 1):
        take(state, TRAINS)
    assert not state.is_endless(backward=True)
    take(state, TRAINS)
    assert state.is_endless(backward=True)
    assert not state.is_endless(backward=False), "nothing was trained"
    state.any_ended = True
    assert not state.is_endless(backward=True), "steps of this program end"


def test_calls_of_several_models_together_make_a_step_endless() -> None:
    state = armed()
    for number in range(MAX_ROOT_CALLS):
        take(state, TRAINS._replace(model=number % 3))
    assert state.is_endless(backward=True)


@pytest.mark.parametrize("trained", [0, 1, 3])
def test_eight_calls_without_gradient_have_room_and_two_more_for_each_with(trained: int) -> None:
    state = armed()
    for _ in range(trained):
        take(state, TRAINS)
    rooms = [take(state, BESIDE) for _ in range(20)]
    assert rooms.count(Room.FREE) == 8 + 2 * trained == MOST_ASIDE + 2 * trained
    assert rooms[-1] is Room.FULL
    assert take(state, BESIDE._replace(training_mode=True)) is Room.CROWDED


@pytest.mark.parametrize(("training_mode", "expected"), [(True, MOST_ASIDE), (False, 3)])
def test_calls_before_anything_is_trained_have_the_room_of_what_they_may_be(
    training_mode: bool, expected: int
) -> None:
    state = armed()
    call = Call("net", RootCall.UNDECIDED, gradient=False, training_mode=training_mode)
    rooms = [take(state, call, evaluation=3) for _ in range(12)]
    assert rooms.count(Room.FREE) == expected


def test_what_is_called_before_anything_is_trained_or_captured_is_an_evaluation() -> None:
    state = StepState()
    call = Call("net", RootCall.UNDECIDED)
    assert state.kind(call, backward=False, stepped=False) is RootCall.EVALUATION
    assert armed().kind(call, backward=False, stepped=False) is RootCall.UNDECIDED


@pytest.mark.parametrize(
    ("changes", "backward", "stepped", "expected"),
    [
        ({}, False, False, RootCall.UNDECIDED),
        ({"gradient": False}, False, False, RootCall.EVALUATION),
        ({"parametric": False}, False, False, RootCall.EVALUATION),
        ({}, True, True, RootCall.UNDECIDED),  # the first call in a step
    ],
)
def test_a_call_in_evaluation_mode_may_be_a_step_of_fine_tuning(
    changes: dict[str, Any], backward: bool, stepped: bool, expected: RootCall
) -> None:
    call = Call("net", RootCall.EVALUATION, training_mode=False)._replace(**changes)
    assert armed().kind(call, backward=backward, stepped=stepped) is expected


@pytest.mark.parametrize(("backward", "stepped"), [(True, False), (False, True)])
def test_a_call_in_evaluation_mode_after_one_that_trains_is_an_evaluation(
    backward: bool, stepped: bool
) -> None:
    state = armed()
    take(state, TRAINS)
    call = Call("net", RootCall.EVALUATION, training_mode=False)
    assert state.kind(call, backward=backward, stepped=stepped) is RootCall.EVALUATION
    assert state.trained == 1


def test_labels_are_too_late_once_a_call_has_decided_against_the_step() -> None:
    state = StepState()
    state.begin(Plan.WATCH)
    assert not state.decide(due=False)
    assert state.stage is Stage.DECLINED
    assert not state.decide(due=True)
    state.reconsider()
    assert state.decide(due=True)


def test_a_number_that_is_set_is_the_one_of_the_step_whatever_was_counted() -> None:
    counted = 0
    number: Callable[[], int] = lambda: counted  # noqa: E731
    state = StepState(number)
    counted = 5
    assert state.number == 5
    state.number = 100
    counted = 8
    assert state.number == 103


def test_the_limits_are_those_that_the_docs_name() -> None:
    assert (step_state.MAX_ROOT_CALLS, step_state.MOST_ASIDE) == (2000, 8)
