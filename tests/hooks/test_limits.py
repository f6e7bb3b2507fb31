"""The limits on waiting and memory: each is tested just below and at its value."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from comgra_decl.hooks import cross_thread, step_clock, tracer, training_threads
from comgra_decl.hooks.cross_thread import Marks
from comgra_decl.hooks.graph import structures
from comgra_decl.hooks.graph.structures import Structures
from comgra_decl.hooks.hand_updates import HandUpdates
from comgra_decl.hooks.optimizers import CalledModels
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.scalars import scalars as of_scalars
from comgra_decl.hooks.scalars.scalars import END, Saying, Scalars
from comgra_decl.hooks.schedule import agenda as of_agenda
from comgra_decl.hooks.schedule import unended
from comgra_decl.hooks.schedule.agenda import Agenda
from comgra_decl.hooks.schedule.budget import Budget, Meter
from comgra_decl.hooks.schedule.evaluation import EvaluationPhases
from comgra_decl.hooks.schedule.unended import UnendedSteps
from comgra_decl.hooks.step_clock import Seen, StepClock
from comgra_decl.hooks.tensors import capture as of_capture
from comgra_decl.hooks.tensors import gradients
from comgra_decl.hooks.tensors.gradients import Backwards
from comgra_decl.hooks.training_threads import Lane, Lanes
from comgra_decl.records import ScalarBatch, StepInfo
from comgra_decl.spec import load_spec
from comgra_decl.spec.schedule import EvalSpec
from tests.hooks.tiny import net, step
from tests.support.recording import EVERYTHING, recording


def never(*_: Any) -> Any:
    raise AssertionError("not to be called")


# -- threads that train concurrently --------------------------------------------------------------


def lanes(*, records: list[int]) -> Lanes:
    """Training threads, the first of which is followed, and the steps that they recorded last."""
    made = [
        Lane(-number, StepClock(warn=never), HandUpdates(held=never), Saying(), record=record)
        for number, record in enumerate(records)
    ]
    made[0].thread = this_thread.number
    found = Lanes(made[0])
    for lane in made[1:]:
        found.add(lane)
    return found


def test_a_record_is_left_to_another_thread_for_four_steps_and_then_taken() -> None:
    found = lanes(records=[5, 1])
    assert [found.leaves() for _ in range(6)] == [True] * 4 + [False] * 2
    assert training_threads._PATIENCE == 4
    assert not [*found][1].waits, "nobody waits for it again until it has ended a step"


def test_a_record_that_a_thread_does_not_begin_is_taken_over_after_four_refusals_for_each() -> None:
    found = lanes(records=[0, 0, 0])
    assert [found.tired() for _ in range(13)] == [False] * 12 + [True]


def test_a_record_that_has_begun_is_given_up_after_a_thousand_steps_of_others() -> None:
    found = lanes(records=[0, 0])
    stale = []
    for found.passed in (999, 1000):
        stale.append(found.stale)
    assert stale == [False, True]
    assert training_threads._STALE == 1000


def test_the_outputs_behind_a_loss_are_looked_for_among_two_thousand_functions() -> None:
    marks, x = Marks(), torch.ones(1, requires_grad=True)
    output = x * 2.0
    marks.put_on(output)
    loss = output
    for _ in range(cross_thread._MOST_NODES - 1):
        loss = loss + 1.0
    assert marks.are_behind(loss)
    assert not marks.are_behind(loss + 1.0)
    assert cross_thread._MOST_NODES == 2000


# -- what ends a step -----------------------------------------------------------------------------


def test_an_optimizer_that_was_expected_is_given_up_at_the_eighth_step_of_another() -> None:
    warnings: list[str] = []
    clock = StepClock(warn=warnings.append)
    seen = Seen([1], {2: [1, 9]})
    ended = [clock.stepped(1, seen=seen) for _ in range(step_clock._PATIENCE)]
    assert ended == [False] * 7 + [True]
    assert len(warnings) == 1


def test_a_rule_that_ends_no_step_is_reported_at_the_hundredth_step_of_others() -> None:
    warnings: list[str] = []
    clock = StepClock("Adam", warn=warnings.append)
    for _ in range(99):
        assert not clock.stepped(1, classes=["SGD"])
    assert warnings == []
    clock.stepped(1, classes=["SGD"])
    assert len(warnings) == 1
    assert "in the last 100 optimizer steps" in warnings[0]


def test_steps_that_nobody_ends_are_found_at_the_third_look_that_sees_a_change() -> None:
    steps, parameter = UnendedSteps(), torch.ones(2, requires_grad=True)
    found = []
    for _ in range(unended._PATIENCE + 1):  # the first check has nothing to compare with
        found.append(steps.look(0, [parameter]))
        parameter.detach().add_(1.0)
    assert found == [False, False, False, True]


def test_changes_of_sixty_four_parameters_are_looked_at() -> None:
    before = [torch.ones(1, requires_grad=True) for _ in range(unended._LOOKED_AT - 1)]
    last, beyond = (torch.ones(1, requires_grad=True) for _ in range(2))
    counted = unended._changes([*before, last, beyond])
    beyond.detach().add_(1.0)
    assert unended._changes([*before, last, beyond]) == counted
    last.detach().add_(1.0)
    assert unended._changes([*before, last, beyond]) == cast("int", counted) + 1


def test_calls_are_watched_for_four_steps_after_an_optimizer_that_was_never_seen() -> None:
    called = CalledModels(on_fault=never)
    called.watch()
    watched = []
    for _ in range(6):
        watched.append(called._calls.on)
        called.begin_step()
    assert watched == [True] * 4 + [False] * 2


@pytest.mark.parametrize(("layers", "found"), [(399, True), (400, False)])
def test_parameters_are_looked_for_among_four_hundred_functions(layers: int, found: bool) -> None:
    parameter = nn.Parameter(torch.ones(1))
    loss: torch.Tensor = parameter
    for _ in range(layers):
        loss = loss.sin()
    updates = HandUpdates(held=lambda _: False)
    updates.backward(loss)
    assert updates.pending is found


def test_the_four_parameters_nearest_to_the_loss_are_looked_at() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(6)]
    loss = torch.ones(1)
    for parameter in parameters:
        loss = loss * parameter
    updates = HandUpdates(held=lambda _: False)
    updates.backward(loss)
    assert [look.parameter() for look in updates._looks] == parameters[:1:-1]


# -- what is recorded -----------------------------------------------------------------------------


def test_an_evaluation_that_is_recorded_whole_has_two_thousand_calls_at_most() -> None:
    capture: Any = SimpleNamespace(open=False, root_calls=0, drop=lambda: None)

    def begin() -> None:
        capture.open, capture.root_calls = True, 0

    capture.begin = begin
    phases = EvaluationPhases(capture, EvalSpec(batches="all"))
    phases.begin(0, 1)
    taken = [phases.enter(0) is not None for _ in range(2001)]
    assert taken == [True] * 2000 + [False]


def test_the_first_step_of_each_of_256_types_is_recorded_at_once() -> None:
    spec = load_spec({"schedule": {"steps": None, "every": 10**9, "first": 0}})
    budget = Budget(spec.schedule.budget, meter=Meter(), say=never)
    agenda = Agenda(spec, budget, clock=lambda: 0.0)
    agenda.plan(1)
    agenda._all.recorded(0)
    recorded = []
    for number in range(of_agenda._MAX_TYPES + 2):
        agenda.tag([f"type {number}"], too_late=False)
        recorded.append(agenda.due)
        agenda.end(recorded=agenda.due)
    assert recorded == [True] * 256 + [False] * 2


def test_a_graph_is_followed_in_the_first_two_records_and_every_tenth() -> None:
    followed = Structures(lambda _: None, enabled=True, on_fault=never, warn=never)
    found = []
    for number in range(23):
        wanted = followed.start() is not None
        found.append(wanted)
        followed.finish(StepInfo(number, 0.0, "train", "train"), 7, training=True)
    assert [n for n, wanted in enumerate(found) if wanted] == [0, 1, 10, 20]
    assert (structures._FOLLOWED_FIRST, structures._RECAPTURE_EVERY) == (2, 10)


@dataclass
class Nested:
    inside: Any


@pytest.mark.parametrize(("depth", "found"), [(8, 1), (9, 0)])
def test_tensors_are_found_eight_levels_deep(depth: int, found: int) -> None:
    value: Any = torch.ones(1)
    for level in range(depth):
        value = ([value], {"a": value}, (value,), Nested(value))[level % 4]
    assert len(tensors_in(value)) == found


def test_layouts_of_steps_and_places_of_backwards_are_forgotten_rather_than_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(of_capture, "_MAX_LAYOUTS", 2)
    monkeypatch.setattr(gradients, "_MOST_CALLERS", 2)
    seen: list[tuple[int, int]] = []

    class Watched(Backwards):
        def end(self) -> None:
            super().end()
            seen.append((len(self._known), 0))

    monkeypatch.setattr(of_capture, "Backwards", Watched)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for number in range(6):  # a notebook: each cell is new code
            exec(f"step(model, optimizer, {number + 2})", {**globals(), **locals()})
    assert [record.info.step for record in run.steps] == [*range(6)]
    assert max(places for places, _ in seen) == 2


def test_models_of_one_class_beyond_the_thirty_second_take_up_the_names_of_those_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracer, "_MOST_NAMESAKES", 3)
    with recording(EVERYTHING) as run:
        for _ in range(6):
            model = net()
            step(model, torch.optim.SGD(model.parameters(), lr=0.1))
            del model
            gc.collect()
    classes = {key.node.partition(".")[0] for key in run.slots if "Sequential" in key.node}
    assert len(classes) <= 3
    assert [record.info.step for record in run.steps] == [*range(6)]


# -- metrics of all steps -------------------------------------------------------------------------


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> tuple[Scalars, list[ScalarBatch]]:
    """Counts the deliveries of metrics."""
    monkeypatch.setattr(of_scalars, "_HAND_OVER", 1e9)
    handed_over: list[ScalarBatch] = []
    return Scalars(handed_over.append, on_fault=never), handed_over


def test_numbers_said_within_a_step_are_closed_at_twenty_thousand(
    collected: tuple[Scalars, list[ScalarBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_scalars, "_MOST", 50)
    scalars, _ = collected
    for number in range(49):
        scalars.kpi("a", float(number))
    assert not scalars._closed
    scalars.kpi("a", 49.0)
    assert [len(numbers) for _, _, numbers in scalars._closed] == [50]
    assert not scalars.saying.numbers


def test_numbers_of_steps_are_handed_over_at_five_thousand_steps(
    collected: tuple[Scalars, list[ScalarBatch]],
) -> None:
    scalars, handed_over = collected
    scalars.end_step(0, [])  # the first time, it is always delivered
    handed_over.clear()
    for number in range(1, of_scalars._MOST_CLOSED):
        scalars.events += [1.0, END]
        scalars._look()
        assert len(scalars._closed) == number
    scalars.events.append(1.0)
    scalars.end_step(5000, [])
    assert len(handed_over) == 1
    assert len(handed_over[0].steps) == of_scalars._MOST_CLOSED == 5000
