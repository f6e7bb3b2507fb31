"""Teachers, averages, target networks and opponents are judged by what holds and updates them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.trainings import BATCH, alarms, by_rule, fit, found, mlp, regression
from tests.support.shortened import shortened

LOSS = regression(lambda p, y: F.mse_loss(p[:, 0], y))


def move(average: nn.Module, model: nn.Module, share: float = 0.1) -> None:
    """Moves the parameters of an average slightly towards those of a model."""
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, share)


def q_learning(*, requires_grad: bool, called: bool = True) -> None:
    """A target network that is copied from the network and follows it."""
    network = mlp(4, 8, 3)
    target = copy.deepcopy(network).requires_grad_(requires_grad).eval()

    def loss_of(model: nn.Module) -> torch.Tensor:
        state, action = torch.randn(BATCH, 4), torch.randint(3, (BATCH, 1))
        value = state.sum(1)
        if called:
            with torch.no_grad():
                value = value + 0.9 * target(torch.randn(BATCH, 4)).max(1).values
        return F.smooth_l1_loss(model(state).gather(1, action).squeeze(1), value)

    fit(network, loss_of, after=lambda: move(target, network))


def average() -> None:
    """An average of weights that is evaluated after each step."""
    network = mlp(4, 8, 1)
    mean = copy.deepcopy(network).requires_grad_(False)

    def after() -> None:
        move(mean, network)
        with torch.no_grad():
            mean(torch.randn(BATCH, 4))

    fit(network, LOSS, after=after)


def distillation() -> None:
    """A teacher that could be trained, but is in no optimizer and is called without gradient."""
    teacher = mlp(4, 8, 3)

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(BATCH, 4)
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        return F.kl_div(model(x).log_softmax(1), soft, reduction="batchmean")

    fit(mlp(4, 8, 3), loss_of)


def siamese() -> None:
    """The last bias cancels in the difference of two outputs."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        a, b = torch.randn(BATCH, 4), torch.randn(BATCH, 4)
        same = (a[:, 0] * b[:, 0] > 0).float()
        distance = (model(a) - model(b)).pow(2).sum(1)
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()

    fit(mlp(4, 8, 6), loss_of)


def bias_before_norm() -> None:
    """A bias that a normalization cancels."""
    fit(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)), LOSS)


def adversaries() -> None:
    """A generator that is trained first, while its opponent cannot be trained."""
    generator = nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 4), nn.Tanh()
    )
    critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    first = torch.optim.Adam(generator.parameters(), 2e-3)
    second = torch.optim.Adam(critic.parameters(), 2e-3)
    with torch.no_grad():  # like a summary of the models
        critic(generator(torch.randn(2, 4)))
    for _ in range(20):
        noise, real = torch.randn(BATCH, 4), torch.tanh(torch.randn(BATCH, 4) / 2)
        yes, no = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
        critic.requires_grad_(False)
        first.zero_grad()
        F.binary_cross_entropy(critic(generator(noise)), yes).backward()
        first.step()
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        second.zero_grad()
        fake = F.binary_cross_entropy(critic(generator(noise).detach()), no)
        (F.binary_cross_entropy(critic(real), yes) + fake).backward()
        second.step()
        generator.requires_grad_(True)


@pytest.mark.parametrize(
    "training",
    shortened(
        [
            lambda: q_learning(requires_grad=True),
            lambda: q_learning(requires_grad=False),
            lambda: q_learning(requires_grad=True, called=False),
            average,
            distillation,
            siamese,
            bias_before_norm,
            adversaries,
        ],
        tried=3,
    ),
    ids=[
        "target network",
        "frozen target network",
        "target network that is not called",
        "average of weights",
        "teacher",
        "siamese",
        "bias before a norm",
        "adversaries that take turns",
    ],
)
def test_a_healthy_training_raises_no_alarm(training: Callable[[], None], tmp_path: Path) -> None:
    findings = found(tmp_path, training)
    assert alarms(findings) == []
    assert "frozen_parameters" not in by_rule(findings)


def test_a_head_replaced_after_the_optimizer_was_made_is_not_trained(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model[2] = nn.Linear(8, 1)
        fit(model, LOSS, optimizer=optimizer)

    best = found(tmp_path, training)[0]
    assert (best.rule, best.severity, str(best.place)) == (
        "untrained_parameter",
        "error",
        "2 weight",
    )
    assert "belongs to no optimizer" in best.message


def test_a_body_left_out_of_the_optimizer_is_a_hint(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 8, 1)
        fit(model, LOSS, optimizer=torch.optim.Adam(model[2].parameters(), 0.01))

    findings = found(tmp_path, training)
    assert alarms(findings) == []
    assert str(by_rule(findings)["untrained_parameter"].place) == "0 weight"


def test_a_frozen_encoder_is_a_hint(tmp_path: Path) -> None:
    def training() -> None:
        encoder = nn.Linear(4, 8).requires_grad_(False)  # 40 of 121 elements
        model = nn.Sequential(encoder, nn.Tanh(), mlp(8, 8, 1))
        fit(model, LOSS, optimizer=torch.optim.Adam(model[2].parameters(), 0.01))

    findings = found(tmp_path, training)
    assert alarms(findings) == []
    assert by_rule(findings)["frozen_parameters"].evidence == {"frozen": 40, "all": 121}


def test_a_module_that_is_never_called_is_a_hint(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    findings = found(tmp_path, lambda: fit(Net(), LOSS))
    assert [(f.rule, f.severity, str(f.place)) for f in findings] == [
        ("untrained_parameter", "hint", "spare weight")
    ]


def test_a_sample_without_a_gradient_is_a_hint(tmp_path: Path) -> None:
    """`sample` instead of `rsample`: only the prior trains the encoder."""

    class Coder(nn.Module):
        def __init__(self, draw: str) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4), nn.Linear(2, 4)
            self.draw = draw

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, log_var = self.encode(x).chunk(2, 1)
            code = torch.distributions.Normal(mean, (log_var / 2).exp())
            return self.decode(getattr(code, self.draw)()), mean, log_var

    def loss_of(model: nn.Module) -> torch.Tensor:
        x = torch.randn(BATCH, 4)
        out, mean, log_var = model(x)
        return F.mse_loss(out, x) + 0.1 * (mean**2 + log_var.exp() - log_var - 1).mean()

    findings = by_rule(found(tmp_path / "a", lambda: fit(Coder("sample"), loss_of)))
    assert findings["detached"].severity == "hint"
    assert str(findings["detached"].place) == "encode"
    assert found(tmp_path / "b", lambda: fit(Coder("rsample"), loss_of)) == []
