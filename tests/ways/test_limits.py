"""What cannot be recorded is said, with the way out, in the log and in the run's report."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.support.recording import EVERYTHING, recording


class Direct(nn.Module):
    """Uses its layers without calling all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(3, 3)
        self.direct = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.direct.forward(self.called(x))


def test_a_forward_that_is_called_directly_is_told_from_a_module_that_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    said = run.report["warnings"]
    (direct,) = [sentence for sentence in said if "have gradients" in sentence]
    assert ": direct (1 in all)" in direct
    assert "write module(x) instead" in direct
    (unused,) = [sentence for sentence in said if "only lends its weights" in sentence]
    assert ": unused (1 in all)" in unused
    assert direct in caplog.text
    assert run.report["never_called"] == ["direct", "unused"]


def test_backward_without_a_step_names_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
    assert "comgra.step()" in caplog.text
    assert any("comgra.step()" in sentence for sentence in run.report["warnings"])
