"""What ends a step, and which evaluation phases are recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording


def forward_and_backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, 3)).sum().backward()


def adversarial() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models: list[nn.Module] = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1))]
    return models, [
        torch.optim.SGD(models[0].parameters(), lr=0.1),
        torch.optim.Adam(models[1].parameters(), lr=0.1),
    ]


@pytest.mark.parametrize(
    ("rule", "steps"), [("Adam", 3), (1, 3), ("1", 3), ("any", 18), ("SGD", 15), (0, 15)]
)
def test_a_critic_may_step_more_often_than_its_generator(rule: str | int, steps: int) -> None:
    (critic, generator), (often, seldom) = adversarial()
    with recording(EVERYTHING, schedule={"step": rule, "first": 100}) as run:
        for _ in range(3):
            for _ in range(5):
                forward_and_backward(critic)
                often.step()
            forward_and_backward(generator)
            seldom.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps if s.info.mode == "train"] == [*range(steps)]
    if rule == "Adam":
        assert run.has("Linear", iteration=4, step=2)
        assert run.has("Sequential.0", "weight", pass_="grad", step=2)


def cycle(*optimizers: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for model, optimizer in optimizers:
        forward_and_backward(model)
        optimizer.step()


def test_one_that_turns_up_later_and_steps_less_often_ends_the_steps() -> None:
    (critic, generator), (often, seldom) = adversarial()
    with recording() as run:
        for _ in range(6):
            cycle(*[(critic, often)] * 5, (generator, seldom))
    assert run.faults == []
    # the critic's own until the generator has stepped twice, then one for both
    assert len(run.steps) == 10 + 1 + 4
    for number in range(11, 15):
        assert run.has("Linear", iteration=4, step=number)
        assert run.has("Sequential.0", "weight", pass_="grad", step=number)


def test_one_that_steps_as_often_does_not_take_over() -> None:
    (critic, generator), (first, second) = adversarial()
    with recording() as run:
        cycle(*[(critic, first)] * 3)
        for _ in range(4):
            cycle((critic, first), (generator, second))
    assert len(run.steps) == 7


def test_a_program_that_goes_on_to_another_phase_is_followed() -> None:
    (body, head), (first, second) = adversarial()
    with recording(EVERYTHING, schedule={"first": 1, "every": 10}) as run:
        cycle(*[(body, first)] * 30)
        cycle(*[(head, second)] * 60)
    late = [step for step in run.steps if step.info.step > 40]
    assert len(late) >= 3
    assert run.has("Sequential.0", "weight", pass_="grad", step=run.steps.index(late[-1]))
    assert not run.has("Sequential.0", iteration=1, step=run.steps.index(late[-1]))


def test_an_optimizer_that_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording(EVERYTHING, schedule={"step": "Adam"}):
        for _ in range(100):
            forward_and_backward(model)
            optimizer.step()
    assert "schedule.step: 'Adam' has ended no step in the last 100 optimizer steps" in caplog.text


def without_optimizer(model: nn.Module, count: int) -> Iterator[None]:
    for _ in range(count):
        forward_and_backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        yield


def test_the_program_may_end_its_steps_itself() -> None:
    model = nn.Linear(3, 2)
    with recording(EVERYTHING, schedule={"first": 2, "every": 3}) as run:
        for _ in without_optimizer(model, 7):
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 3, 6]
    assert run.has("Linear", pass_="grad", step=3)


def test_the_programs_word_wins_over_optimizers_and_this_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        for _ in range(3):
            forward_and_backward(model)
            optimizer.step()
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 2]
    assert sum("comgra.step()" in record.message for record in caplog.records) == 1


def test_several_optimizer_steps_are_one_where_the_program_says_so() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"step": "explicit"}) as run:
        for _ in range(2):
            for _ in range(3):
                forward_and_backward(model)
                optimizer.step()
            comgra.step()
    assert len(run.steps) == 2
    assert run.has("Linear", iteration=2, step=1)


def test_a_step_inside_a_call_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Impatient(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            comgra.step()
            return super().forward(x)

    model = Impatient(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING), recording() as run:
        forward_and_backward(model)
        optimizer.step()
    assert [s.info.step for s in run.steps] == [0]
    assert "inside the call of a module" in caplog.text


def test_a_call_that_never_returned_does_not_hold_up_the_steps() -> None:
    class Interrupted(nn.Linear):
        interrupted = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Interrupted(3, 2)
    with recording(EVERYTHING, schedule={"step": "explicit"}) as run:
        model.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 3))
        model.interrupted = False
        for _ in range(3):
            forward_and_backward(model)
            comgra.step()
    assert [s.info.step for s in run.steps] == [0, 1, 2]


# -- evaluation -----------------------------------------------------------------------------------


def evaluated(phases: int, *, calls: int = 1, switch: str = "eval", **evaluation: Any) -> Recording:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"first": 1, "every": 1000, "eval": evaluation}
    with recording(EVERYTHING, schedule=schedule) as run:
        for _ in range(phases):
            model.train()
            for _ in range(3):
                forward_and_backward(model)
                optimizer.step()
            model.eval() if switch == "eval" else model.train(False)
            with torch.no_grad():
                for _ in range(calls):
                    model(torch.randn(4, 3))
    assert run.faults == []
    return run


@pytest.mark.parametrize("switch", ["eval", "train(False)"])
def test_an_evaluation_between_recorded_steps_is_seen_however_it_begins(switch: str) -> None:
    run = evaluated(4, switch=switch)
    assert [s.info.step for s in run.of("eval")] == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("cadence", "recorded"),
    [
        ({"every": 3}, [0, 3, 6]),
        ({"first": 2, "every": 4}, [0, 1, 4]),
        ({"steps": [2, 5]}, [2, 5]),
        ({"first": 0, "every": None, "windows": [[3, 4]]}, [3, 4]),
        ({"every": 1, "backoff": 2}, [0, 1, 2, 4]),
    ],
)
def test_phases_are_counted_by_the_same_words_as_steps(
    cadence: dict[str, Any], recorded: list[int]
) -> None:
    run = evaluated(8, **cadence)
    assert [s.info.step // 3 - 1 for s in run.of("eval")] == recorded


@pytest.mark.parametrize(("batches", "recorded"), [(None, 1), (2, 2), (9, 5), ("all", 5)])
def test_more_than_the_first_batch_of_a_phase(batches: int | str | None, recorded: int) -> None:
    run = evaluated(2, calls=5, batches=batches)
    assert len(run.of("eval")) == 2
    position = [i for i, step in enumerate(run.steps) if step.info.type == "eval"][-1]
    assert [k for k in range(6) if run.has("0", iteration=k, step=position)] == [*range(recorded)]


def test_parts_that_are_frozen_are_no_evaluation() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING, schedule={"first": 1, "every": 1000}) as run:
        for _ in range(3):
            model.train()
            model[1].eval()
            assert (len(nn.modules.module._global_forward_hooks) > 0) == (len(run.steps) == 0)
            forward_and_backward(model)
            optimizer.step()
    assert len(run.steps) == 1
