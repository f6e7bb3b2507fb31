"""How many iterations of a node are recorded in one step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording


class Cells(nn.Module):
    """A cell that is called for each of many time steps, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for now in x:
            state = self.cell(now, state)
        assert state is not None
        named = comgra.node(state[0], "last")
        output: torch.Tensor = self.out(named)
        return output


def traced(length: int, *, closures: int = 1, **spec: Any) -> tuple[Recording, Cells]:
    torch.manual_seed(0)
    model = Cells()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=closures, tolerance_change=0.0)
    x, y = torch.randn(length, 4, 2), torch.randn(4, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    with recording({**EVERYTHING, **spec}) as run:
        for _ in range(2):
            optimizer.step(closure)
    assert run.faults == []
    return run, model


def iterations(run: Recording, node: str) -> int:
    return 1 + max(key.iteration for key in run.slots if key.node == node)


def schedule(most: int | None) -> dict[str, Any]:
    return {"schedule": {"first": 99, "max_iterations": most}}


def test_a_step_of_more_has_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = traced(40, **schedule(7))
    assert iterations(run, "cell") == 7
    assert iterations(run, "out") == 1
    [sentence] = [text for text in caplog.messages if "max_iterations" in text]
    assert "only the first 7 iterations" in sentence
    assert "cell" in sentence
    assert sentence in run.report["warnings"]


def test_evaluations_of_a_closure_count_together() -> None:
    run, _ = traced(3, closures=5, **schedule(4))
    assert {node: iterations(run, node) for node in ("cell", "out", "loss", "input", "last")} == {
        "cell": 4, "out": 4, "loss": 4, "input": 4, "last": 4,
    }  # fmt: skip


def test_all_are_recorded_where_no_number_is_given(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run, _ = traced(300, **schedule(None))
    assert iterations(run, "cell") == 300
    assert not [text for text in caplog.messages if "max_iterations" in text]


def test_by_default_it_is_256() -> None:
    run, _ = traced(300, schedule={"first": 99})
    assert iterations(run, "cell") == 256


def test_what_follows_is_still_joined_with_what_came_before() -> None:
    """The graph passes through the calls that are not recorded."""
    run, _ = traced(20, **schedule(5))
    assert ("cell", "last") in run.edges()
    assert ("last", "out") in run.edges()


def test_gradients_of_parameters_are_those_of_all_iterations() -> None:
    few, all_ = (traced(30, **schedule(most))[0] for most in (3, None))
    for role in ("weight_ih", "weight_hh"):
        one, other = (run.value("cell", role, pass_="grad") for run in (few, all_))
        assert (one == other).all()
