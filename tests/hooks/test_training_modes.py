"""Each record stores the mode in which each model was called with gradients."""

from __future__ import annotations

import torch
from torch import nn

from comgra_decl.records import MODES
from tests.support.recording import EVERYTHING, Recording, recording


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def step(optimizer: torch.optim.Optimizer, *models: nn.Module) -> None:
    """Trains models one after another on [4, 3]; each receives the output of the previous one."""
    optimizer.zero_grad()
    for model in models:
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def modes(run: Recording, type_: str = "train") -> list[dict[str, bool]]:
    assert run.faults == []
    return [step.info.extra.get(MODES, {}) for step in run.of(type_)]


def test_the_mode_of_a_model_is_that_of_its_calls() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for training in (True, False, True):
            step(optimizer, model.train(training))
    assert modes(run) == [{"Net": True}, {"Net": False}, {"Net": True}]


def test_one_call_in_training_mode_is_enough() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        optimizer.zero_grad()
        for training in (False, True, False):
            model.train(training)(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    assert modes(run) == [{"Net": True}]


def test_each_model_has_a_mode_of_its_own() -> None:
    first, second = Net(), Net().eval()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with recording(EVERYTHING) as run:
        step(optimizer, first, second)
    assert modes(run) == [{"Net": True, "Net#2": False}]


def test_calls_without_gradients_tell_no_mode() -> None:
    """Evaluations, and targets from a network that is always in evaluation mode."""
    model, target = Net(), Net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for _ in range(2):
            with torch.no_grad():
                target(torch.randn(4, 3))
            step(optimizer, model.train())
            with torch.no_grad():
                model.eval()(torch.randn(4, 3))
    assert [[*mode.values()] for mode in modes(run)] == [[True], [True]]
    assert modes(run, "eval") == [{}, {}]


def test_a_frozen_batch_norm_leaves_its_model_in_training_mode() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1].eval()
    with recording(EVERYTHING) as run:
        step(optimizer, model)
    assert modes(run) == [{"Net": True}]
