"""Optimizers that never step, copies that are never updated, and targets on another scale."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comgra_decl.rules import diagnose
from tests.rules.trainings import NODES, fit, found, mlp, regression
from tests.support.traced import traced

EVERY = {"first": 1_000_000, "eval": {"every": 1}}


@pytest.mark.parametrize("steps", [False, True])
def test_an_optimizer_that_never_steps(steps: bool, tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(8):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(16, 4)), torch.randn(16, 1)).backward()
            if steps:
                optimizer.step()

    never = [f for f in found(tmp_path, training) if f.rule == "never_stepped"]
    assert [f.severity for f in never] == ([] if steps else ["error"])


@pytest.mark.parametrize("updated", [False, True])
def test_an_evaluated_copy_that_is_never_updated(updated: bool, tmp_path: Path) -> None:
    def training() -> None:
        torch.manual_seed(0)
        model = mlp(4, 8, 1)
        average, steps = deepcopy(model).eval(), iter(range(100))

        @torch.no_grad()
        def after() -> None:
            if updated:
                for mean, new in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new, 0.5)
            if next(steps) % 4 == 3:
                average(torch.randn(16, 4))

        fit(model, regression(lambda answer, y: F.mse_loss(answer[:, 0], y)), after=after)

    findings = diagnose(traced(tmp_path, NODES, training, schedule=EVERY)).findings
    stale = [(f.rule, f.node) for f in findings if f.rule == "stale_copy"]
    assert stale == ([] if updated else [("stale_copy", "Sequential#2")])


@pytest.mark.parametrize(("scale", "severity"), [(500.0, "warning"), (1.0, None)])
def test_targets_that_are_not_normalized(
    scale: float, severity: str | None, tmp_path: Path
) -> None:
    def form(answer: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(answer[:, 0], scale * y)

    findings = found(tmp_path, lambda: fit(mlp(4, 8, 1), regression(form)))
    severities = [f.severity for f in findings if f.rule == "target_scale"]
    assert severities == ([] if severity is None else [severity])
