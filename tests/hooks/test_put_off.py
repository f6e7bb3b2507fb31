"""Tensors of a GPU that are read later than they are seen: what a program writes meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks.tensors import capture
from comgra_decl.records import Raw
from comgra_decl.stats import OVERWRITTEN
from tests.stats.test_triton import OnGpu, with_interpreter
from tests.support.recording import EVERYTHING, Recording, recording


class WritesLate(nn.Module):
    """Begins, at some call, to write into what its first layer has returned."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.left = begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.left -= 1
        return self.second(hidden.mul_(2) if self.left < 0 else hidden * 2)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the host for a GPU with Triton."""
    monkeypatch.setattr(capture, "Reducer", OnGpu)


def trained(begins: int) -> tuple[Recording, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = WritesLate(begins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = []
    with recording(EVERYTHING) as run:
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 3)
            hidden.append(F.linear(x, model.first.weight, model.first.bias).detach())
            F.mse_loss(model(x), torch.zeros(4, 1)).backward()
            optimizer.step()
            run.rows("loss", step=len(run.steps) - 1)  # waited for, as the writer thread does
    assert run.faults == []
    return run, hidden


@pytest.mark.usefixtures("on_gpu")
@with_interpreter
def test_triton_records_what_a_module_returned_or_says_that_it_did_not() -> None:
    run, hidden = trained(begins=3)
    assert run.report["refused"] == {"first output": OVERWRITTEN}
    for step, expected in enumerate(hidden):
        assert run.has("first", step=step) == (step != 3)
        assert run.has("second", step=step)
        if step != 3:
            raw = run.rows("first", step=step)
            np.testing.assert_allclose(raw[:, Raw.MAX], expected.numpy().max(1), rtol=1e-6)
