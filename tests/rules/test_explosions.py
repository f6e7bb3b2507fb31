"""An exploding loss is reported, however few losses there are and whatever follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comgra_decl.rules.loss.diverging import LossDiverges
from comgra_decl.rules.loss.flat import LossNotFalling
from tests.rules.tape import Tape
from tests.rules.trainings import by_rule, fit, found, mlp, regression


def told(values: Sequence[float]) -> Tape:
    tape = Tape()
    tape.losses(values)
    return tape


@pytest.mark.parametrize("window", [1, 2, 100])
@pytest.mark.parametrize(
    ("losses", "severity", "step"),
    [
        ([2.0, 1.9, 1.8, 1801.0], "error", 3),  # 1000 times 1.8
        ([2.0, 1.9, 1.8, 1799.0], None, -1),
        ([1.3, 1.5, 21575.0, 900.0, 30.0], "error", 2),  # within the first three
        ([1.3, 1.5, 21575.0, 0.9], "warning", 2),  # back to the first one
        ([1.3, 1.5, 21575.0, 1.4], "error", 2),
        ([1e-6, 1e-6, 1e-6, 9.9], None, -1),  # 1000 times 0.01 is 10
        ([1e-6, 1e-6, 1e-6, 10.1], "error", 3),
        ([-2.0, -1.9, -1.8, -1801.0], "error", 3),
        ([0.01, 600.0, 0.02] + [500.0, 0.03] * 6, "hint", 1),  # two losses in turn
        ([0.01, 600.0, 0.02] + [500.0, 600.0] * 6, "error", 1),
        ([2.3, 1e7, 2.0] + [2.0, 1.0] * 10, "warning", 1),  # a single spike
    ],
)
def test_a_thousand_times_the_start_is_an_explosion(
    losses: list[float], severity: str | None, step: int, window: int
) -> None:
    findings = told(losses).findings(LossDiverges(), window=window)
    expected = [] if severity is None else [(severity, step)]
    assert [(finding.severity, finding.first_step) for finding in findings] == expected


@pytest.mark.parametrize("window", [1, 100])
def test_a_rise_and_fall_is_not_followed_by_fewer_than_twenty_losses(window: int) -> None:
    """From twenty losses on, tenths are compared."""
    rising = [1.0, 0.9, 0.8] + [3.0] * 16
    assert told(rising).findings(LossDiverges(), window=window) == []
    assert len(told([*rising, 3.0]).findings(LossDiverges(), window=window)) == 1


def test_a_rate_far_too_high_is_an_explosion(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 8.0)
        loss_of = regression(lambda p, y: F.mse_loss(p[:, 0], y))
        fit(model, loss_of, steps=8, optimizer=optimizer)

    finding = by_rule(found(tmp_path, training))["loss_diverges"]
    assert (finding.severity, finding.first_step) == ("error", 2)


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_a_loss_that_falls_by_three_per_mille_in_hundreds_of_steps_does_not_fall(
    noise: float,
) -> None:
    """As when gradients are clipped to 1e-4: there is no noise to hide such small changes."""
    torch.manual_seed(0)
    falling = torch.linspace(45.81, 45.68, 300) + noise * torch.randn(300)
    (finding,) = told(falling.tolist()).findings(LossNotFalling())
    assert finding.evidence["first"] == pytest.approx(45.80, abs=0.01)
    assert told((falling - 44.8).tolist()).findings(LossNotFalling()) == []  # from 1.0 to 0.9


def test_gradients_clipped_to_next_to_nothing_train_nothing(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        x = torch.randn(16, 4)
        y = x.sum(1)
        for _ in range(60):
            optimizer.zero_grad()
            F.mse_loss(model(x)[:, 0], y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()

    assert "loss_not_falling" in by_rule(found(tmp_path, training))
