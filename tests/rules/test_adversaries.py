"""Generators and discriminators whose losses oppose each other, or do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.test_causes_of_strangers import found, mlp
from tests.support.shortened import shortened

RULES = {"cooperating_networks", "opposing_losses"}
Judge = Callable[[Tensor], Tensor]
"""A loss of the judgements [samples, 1]."""


def up(judged: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


def down(judged: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(judged, torch.zeros_like(judged))


def larger(judged: Tensor) -> Tensor:
    return -judged.mean()


def smaller(judged: Tensor) -> Tensor:
    return judged.mean()


def adversaries(
    data: Judge, made: Judge, deceive: Judge, *, shared: bool = False, detach: bool = True
) -> None:
    """Trains a generator and a discriminator; `shared` if by one optimizer."""
    generator, discriminator = mlp(3, 2), mlp(2, 1)
    both = [*generator.parameters(), *discriminator.parameters()]
    first = torch.optim.SGD(both if shared else discriminator.parameters(), lr=0.01)
    second = first if shared else torch.optim.SGD(generator.parameters(), lr=0.01)
    for _ in range(8):
        fake = generator(torch.randn(16, 3))
        first.zero_grad()
        loss_d = data(discriminator(torch.randn(16, 2) + 3))
        loss_d = loss_d + made(discriminator(fake.detach() if detach else fake))
        loss_d.backward()
        first.step()
        second.zero_grad()
        loss_g = deceive(discriminator(generator(torch.randn(16, 3))))
        loss_g.backward()
        second.step()


@pytest.mark.parametrize(
    ("data", "made", "deceive", "rules"),
    [
        (up, down, up, set()),
        pytest.param(down, up, down, set(), marks=pytest.mark.slow),  # labels the other way around
        pytest.param(larger, smaller, larger, set(), marks=pytest.mark.slow),  # Wasserstein
        (up, down, down, {"cooperating_networks"}),
        pytest.param(larger, smaller, smaller, {"cooperating_networks"}, marks=pytest.mark.slow),
        # no opposition at all, so nothing is known about the roles
        pytest.param(up, up, up, set(), marks=pytest.mark.slow),
    ],
)
def test_generators_that_help_their_discriminator(
    data: Judge, made: Judge, deceive: Judge, rules: set[str], tmp_path: Path
) -> None:
    findings = found(tmp_path, lambda: adversaries(data, made, deceive))
    assert findings.keys() & RULES == rules
    for name in rules:
        assert findings[name].first_step == 0


@pytest.mark.parametrize("detach", shortened([False, True], tried=1))
def test_one_optimizer_for_two_losses(detach: bool, tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: adversaries(up, down, up, shared=True, detach=detach))
    assert findings.keys() & RULES == {"opposing_losses"}


def test_gradient_reversal_and_actor_critic_are_correct_with_any_optimizer(tmp_path: Path) -> None:
    def reversal() -> None:
        features, domain = mlp(3, 4), mlp(4, 1)
        optimizer = torch.optim.SGD([*features.parameters(), *domain.parameters()], lr=0.01)
        for _ in range(8):
            optimizer.zero_grad()
            a, b = (features(torch.randn(16, 3) + k) for k in (0, 2))
            for output in (a, b):
                output.register_hook(torch.neg)
            (up(domain(a)) + down(domain(b))).backward()
            optimizer.step()

    def actor_critic() -> None:
        actor, critic = mlp(3, 2), nn.Sequential(mlp(5, 1))
        first = torch.optim.SGD(critic.parameters(), lr=0.01)
        second = torch.optim.SGD(actor.parameters(), lr=0.01)
        for _ in range(8):
            state = torch.randn(16, 3)
            action = actor(state)
            first.zero_grad()
            value = critic(torch.cat([state, action.detach()], 1))
            F.mse_loss(value, state.sum(1, keepdim=True)).backward()
            first.step()
            second.zero_grad()
            (-critic(torch.cat([state, action], 1)).mean()).backward()
            second.step()

    for name, training in (("reversal", reversal), ("actor critic", actor_critic)):
        assert not found(tmp_path / name, training).keys() & RULES
