"""A learning rate of 0 is reported, and explains why the loss does not fall."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comgra_decl.rules import Diagnosis, diagnose, health
from tests.support.shortened import shortened
from tests.support.traced import traced

NODES = {
    "all": {"select": "**", "capture": ["output", "parameter"]},
    "gradients": {"select": "**", "capture": ["parameter_grad"]},
}
STEPS = 80
Factor = Callable[[int], float]
Made = tuple[torch.optim.Optimizer, Factor | list[Factor]]


def diagnosis(root: Path, make: Callable[[nn.Sequential], Made], *, updates: bool) -> Diagnosis:
    """Trains a classifier; the learning rate of group 0 is multiplied by a factor per step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer, factor = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    x = torch.randn(32, 5)

    def training() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            schedule.step()

    more = {"updates": {"select": "**", "capture": ["update"]}} if updates else {}
    return diagnose(traced(root, {**NODES, **more}, training))


def constant(_step: int) -> float:
    return 1.0


@pytest.mark.parametrize("updates", shortened([False, True], tried=1))
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_rate_of_zero_from_the_start(
    kind: type[torch.optim.SGD | torch.optim.Adam], updates: bool, tmp_path: Path
) -> None:
    made = diagnosis(tmp_path, lambda m: (kind(m.parameters(), 0.0), constant), updates=updates)
    findings = {finding.rule: finding for finding in made.findings}
    zero = findings["zero_learning_rate"]
    assert (zero.because, zero.first_step) == (None, 0)
    assert zero.message == (
        "The learning rate of all parameters is 0 from step 0 on: nothing is trained."
    )
    assert findings["loss_not_falling"].because == "zero_learning_rate"
    colours = {check.question.text: check.colour for check in health(made)}
    assert colours["Are the right parameters trained?"] == "red"
    assert colours["Are update sizes healthy?"] == "amber"


def test_a_rate_that_becomes_zero_names_the_step_and_the_rate_before(tmp_path: Path) -> None:
    made = diagnosis(
        tmp_path,
        lambda m: (torch.optim.SGD(m.parameters(), 0.1), lambda step: float(step < 60)),
        updates=False,
    )
    (zero,) = [f for f in made.findings if f.rule == "zero_learning_rate"]
    assert zero.first_step == 60
    assert "from step 60 on; it was 0.1 before" in zero.message


def falls_to_zero(model: nn.Sequential) -> Made:
    """The rate is 0 only in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return optimizer, lambda step: 1 - step / (STEPS - 1)


def starts_at_zero(model: nn.Sequential) -> Made:
    return torch.optim.SGD(model.parameters(), 0.1), lambda step: min(1, step / 10)


def one_group_frozen(model: nn.Sequential) -> Made:
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "lr": 0.1},
    ]
    return torch.optim.SGD(groups), constant


def test_a_group_that_is_never_trained_is_a_hint(tmp_path: Path) -> None:
    made = diagnosis(tmp_path, one_group_frozen, updates=False)
    (zero,) = [f for f in made.findings if f.rule == "zero_learning_rate"]
    assert (zero.severity, zero.first_step) == ("hint", 0)
    assert zero.message == (
        "The learning rate of group 0 of SGD has been 0 from the start: 2 of 4 parameter tensors "
        "are not trained."
    )


def one_group_waits(model: nn.Sequential) -> Made:
    """The schedule keeps one group at 0 for now."""
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return torch.optim.SGD(groups, lr=0.1), [lambda _: 0.0, constant]


@pytest.mark.parametrize(
    "make", shortened([falls_to_zero, starts_at_zero, one_group_waits], tried=1)
)
def test_a_rate_that_is_zero_on_purpose_is_not_reported(
    make: Callable[[nn.Sequential], Made], tmp_path: Path
) -> None:
    made = diagnosis(tmp_path, make, updates=False)
    assert "zero_learning_rate" in made.checked
    assert "zero_learning_rate" not in {finding.rule for finding in made.findings}
    (updates,) = [c for c in health(made) if c.question.text == "Are update sizes healthy?"]
    assert updates.colour == "green"
