"""Threads and processes alongside training, and training outside the main thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.ways.models import Net, batches
from tests.ways.proof import Outcome, Told, outcome, prove


def in_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a separate thread and returns its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def plain(told: Told, model: nn.Module, steps: int = 4) -> Outcome:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches(steps):
        told.modules(model, "stem", "head")
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        told.parameters(model)
        optimizer.step()
        told.end()
        losses.append(loss.item())
    return outcome(losses, model, optimizers=[optimizer])


def test_training_in_a_thread_that_is_not_the_main_one() -> None:
    prove(lambda told: in_thread(lambda: plain(told, Net())))


def test_a_second_thread_that_evaluates_a_copy_all_the_time() -> None:
    """Its calls come between those of the training loop; only the training loop's are recorded."""

    class Other(nn.Sequential):
        """Another model, without random numbers."""

        def __init__(self) -> None:
            super().__init__(*(nn.Linear(16, 16) for _ in range(4)))

    def training(told: Told) -> Outcome:
        other = Other().eval()
        for parameter in other.parameters():
            parameter.detach().fill_(0.01)
        x = torch.ones(4, 16)
        ended, calls = threading.Event(), 0

        def evaluate() -> None:
            nonlocal calls
            with torch.no_grad():
                while not ended.is_set():
                    other(x)
                    calls += 1

        model = Net()
        found = plain(told, model, steps=1)  # so that it is known which thread trains
        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            found = plain(told, model, steps=20)
        finally:
            ended.set()
            thread.join()
        assert calls
        return found

    prove(training)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader(start: str) -> None:
    def training(told: Told) -> Outcome:
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))
        loader = DataLoader(
            data, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=start
        )
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in loader:
            told.modules(model, "head")
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training)


def test_a_fork_in_the_middle_of_a_recorded_step() -> None:
    """The child inherits the hooks, not the run: it continues training, and writes nothing."""

    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number, (x, y) in enumerate(batches(4)):
            told.modules(model, "head")
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            child = os.fork() if number == 1 else -1
            loss.backward()
            optimizer.step()
            if child == 0:
                os._exit(0 if torch.isfinite(model.head.weight).all() else 1)
            if child > 0:
                assert os.waitpid(child, 0)[1] == 0
            told.end()
            losses.append(loss.item())
        return outcome(losses, model)

    prove(training)
