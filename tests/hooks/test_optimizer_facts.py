"""Records store the settings of optimizers that step, and which parameters they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from comgra_decl.records import OPTIMIZERS
from tests.support.recording import EVERYTHING, Recording, recording


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1
) -> Iterator[torch.Tensor]:
    """Trains a model; yields the input of each step after it."""
    for _ in range(count):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        yield x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in steps(model, optimizer, count):
        pass


def facts(run: Recording) -> list[list[dict[str, Any]]]:
    assert run.faults == []
    return [step.info.extra[OPTIMIZERS] for step in run.of("train")]


def held(run: Recording) -> dict[str, bool]:
    """Returns which parameters are optimized, according to the newest document."""
    assert run.faults == []
    document = [s.documents["modules"] for s in run.steps if "modules" in s.documents][-1]
    return {
        f"{module['node']}.{name}": parameter["optimized"]
        for module in document
        for name, parameter in module["parameters"].items()
    }


def test_records_share_a_fact_until_it_changes() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with recording(EVERYTHING) as run:
        for i, _ in enumerate(steps(model, optimizer, 4)):
            if i == 1:
                optimizer.param_groups[0]["lr"] = 0.25
    found = facts(run)
    assert [group["lr"] for (one,) in found for group in one["groups"]] == [0.5, 0.5, 0.25, 0.25]
    assert found[0] is found[1]
    assert found[2] is found[3]


def test_each_group_tells_what_it_is_set_to() -> None:
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.body.parameters(), "lr": 0.1, "weight_decay": 0.5},
        {"params": [model.head.weight], "betas": (0.8, 0.95)},
    ]
    with recording(EVERYTHING) as run:
        train(model, torch.optim.AdamW(groups, lr=0.01))
    assert facts(run) == [
        [
            {
                "class": "AdamW",
                "groups": [
                    {"parameters": 2, "lr": 0.1, "weight_decay": 0.5, "betas": [0.9, 0.999],
                     "maximize": False},
                    {"parameters": 1, "lr": 0.01, "weight_decay": 0.01, "betas": [0.8, 0.95],
                     "maximize": False},
                ],
            }
        ]
    ]  # fmt: skip


def test_a_schedule_shows_in_each_record() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with recording(EVERYTHING) as run:
        for _ in steps(model, optimizer, 4):
            schedule.step()
    rates = [group["lr"] for (optimizer_,) in facts(run) for group in optimizer_["groups"]]
    assert rates == [0.8, 0.4, 0.2, 0.1]
    assert all(one["groups"][0]["momentum"] == 0.9 for (one,) in facts(run))


def test_a_rate_in_a_tensor_is_told_as_a_number() -> None:
    model = Net()
    with recording(EVERYTHING) as run:
        train(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25)))
    ((one,),) = facts(run)
    assert one["groups"][0]["lr"] == 0.25


def test_of_two_optimizers_each_record_has_those_that_stepped() -> None:
    generator, critic = Net(), Net()
    first = torch.optim.Adam(generator.parameters(), lr=1e-3)
    second = torch.optim.SGD(critic.parameters(), lr=0.2)
    with recording(EVERYTHING) as run:
        for _ in range(2):
            train(critic, second)
            train(generator, first)
    names = [[one["class"] for one in optimizers] for optimizers in facts(run)]
    assert names == [["SGD"], ["Adam"], ["SGD"], ["Adam"]]


def test_a_training_without_an_optimizer_has_no_such_facts() -> None:
    model = Net()
    with recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).square().mean().backward()
    assert [OPTIMIZERS in step.info.extra for step in run.steps] == [False]


def all_of_it(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def head_replaced(model: Net) -> torch.optim.Optimizer:
    optimizer = all_of_it(model)
    model.head = nn.Linear(4, 2)
    return optimizer


def head_only(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.head.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_of", "body", "head"),
    [(all_of_it, True, True), (head_replaced, True, False), (head_only, False, True)],
)
def test_a_parameter_is_optimized_if_an_optimizer_holds_it(
    optimizer_of: Callable[[Net], torch.optim.Optimizer], body: bool, head: bool
) -> None:
    model = Net()
    optimizer = optimizer_of(model)
    with recording(EVERYTHING) as run:
        train(model, optimizer, 2)
    expected = {"body.weight": body, "body.bias": body, "head.weight": head, "head.bias": head}
    assert held(run) == expected


def test_a_parameter_stays_optimized_after_the_function_that_trains_has_returned() -> None:
    model = Net()

    def fit() -> None:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)

    with recording(EVERYTHING) as run:
        fit()
        with torch.no_grad():
            model.eval()(torch.randn(2, 3))
    assert {name for name, optimized in held(run).items() if optimized} >= {"body.weight"}


def test_a_group_that_is_added_later_is_held_from_then_on() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        train(model, optimizer)
        assert not held(run)["head.weight"]
        optimizer.add_param_group({"params": model.head.parameters()})
        train(model, optimizer)
    assert held(run)["head.weight"]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_average_of_weights_is_in_no_optimizer(requires_grad: bool) -> None:
    """Copies of one class have separate facts."""
    model = Net()
    average = copy.deepcopy(model).requires_grad_(requires_grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for x in steps(model, optimizer, 3):
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
                average(x)
    own = {name: value for name, value in held(run).items() if not name.startswith("Net#2.")}
    assert own == dict.fromkeys(("body.weight", "body.bias", "head.weight", "head.bias"), True)
    copied = {name: value for name, value in held(run).items() if name.startswith("Net#2.")}
    assert copied == {f"Net#2.{name}": False for name in own}


def test_a_teacher_is_in_no_optimizer() -> None:
    """It is called first, so it is the first of its class."""
    model, teacher = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for _ in range(2):
            x = torch.randn(4, 3)
            with torch.no_grad():
                soft = teacher(x)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), soft).backward()
            optimizer.step()
    found = {name: value for name, value in held(run).items() if name.endswith(".weight")}
    assert found == {
        "Net.body.weight": False,
        "Net.head.weight": False,
        "Net#2.body.weight": True,
        "Net#2.head.weight": True,
    }
