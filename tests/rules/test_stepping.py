"""Optimizers that never step, copies that are never updated, and targets on another scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comgra_decl.rules.parameters.stepping import StaleCopy
from tests.rules.tape import Tape
from tests.rules.trainings import fit, found, mlp, regression


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


@pytest.mark.parametrize(
    ("changes", "also", "found_"), [(0, False, 1), (1, False, 0), (0, True, 0)]
)
def test_an_evaluated_copy_that_is_never_updated(changes: int, also: bool, found_: int) -> None:
    """Unless it changes, or the trained model is evaluated, too."""
    tape = Tape()
    weights, outputs = {}, {}
    for model in ("Net", "Net#2"):
        weights[model] = tape.slot(model, (3, 2), role="weight", kind="parameter", class_="Net")
        outputs[model] = tape.slot(model, (4, 3), class_="Net")
    tape.documents["modules"] = [
        {
            "path": "",
            "node": model,
            "class": "Net",
            "parameters": {"weight": {"optimized": model == "Net"}},
        }
        for model in weights
    ]
    for step in range(12):
        moving = np.full((3, 2), 1.0 + step)
        tape.record({weights["Net"]: moving, outputs["Net"]: np.ones((4, 3))}, step=step)
        if step % 3 == 2:
            copied = {
                weights["Net#2"]: np.ones((3, 2)) + changes * moving,
                outputs["Net#2"]: np.ones((4, 3)),
            }
            trained = {weights["Net"]: moving, outputs["Net"]: np.ones((4, 3))}
            tape.record({**copied, **(trained if also else {})}, step=step, mode="eval")
    nodes = [f.place.node for f in tape.findings(StaleCopy()) if f.place is not None]
    assert nodes == ["Net#2"] * found_


@pytest.mark.parametrize(("scale", "severity"), [(500.0, "warning"), (1.0, None)])
def test_targets_that_are_not_normalized(
    scale: float, severity: str | None, tmp_path: Path
) -> None:
    def form(answer: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(answer[:, 0], scale * y)

    findings = found(tmp_path, lambda: fit(mlp(4, 8, 1), regression(form)))
    severities = [f.severity for f in findings if f.rule == "target_scale"]
    assert severities == ([] if severity is None else [severity])
