# ruff: noqa: ARG001  (callbacks take the arguments of their callers)
"""A generator and a discriminator that train against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.bugs.setup import Data, Setup


@dataclass
class Pair:
    """Settings of the training run.

    Attributes:
        size: width of both networks.
        noise: number of random inputs of the generator.
        rate: learning rate of both networks.
        generator_times: factor for the generator's learning rate.
        discriminate: whether the discriminator trains.
        noise_scale: factor for the noise.
    """

    size: int
    noise: int
    seed: int
    rate: float = 2e-3
    generator_times: float = 1.0
    discriminate: bool = True
    noise_scale: float = 1.0


class Both(nn.Module):
    """A pair of a `generator` and a `discriminator`."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        n = pair.size
        self.generator = nn.Sequential(
            nn.Linear(pair.noise, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 2)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, n), nn.LeakyReLU(0.2), nn.Linear(n, n), nn.LeakyReLU(0.2), nn.Linear(n, 1)
        )


def setup(pair: Pair) -> Setup:
    """Return a training run for a pair on points of a ring."""
    random = torch.Generator().manual_seed(pair.seed)
    angle = 6.2832 * torch.rand(1152, generator=random)
    x = torch.stack([angle.cos(), angle.sin()], 1)
    x += 0.1 * torch.randn(1152, 2, generator=random)

    def run(own: Setup, log: Callable[[str, float], None]) -> list[float]:
        return _run(own, pair)

    return Setup(
        Both(pair),
        Data(x, x, 64, seed=pair.seed),
        F.mse_loss,
        lambda parameters: torch.optim.Adam(parameters, lr=pair.rate, betas=(0.5, 0.99)),
        run=run,
    )


def _run(own: Setup, pair: Pair) -> list[float]:
    assert isinstance(own.model, Both)
    generator, discriminator = own.model.generator, own.model.discriminator
    first = own.optimizer(discriminator.parameters())
    second = own.optimizer(generator.parameters())
    for group in second.param_groups:
        group["lr"] *= pair.generator_times
    losses = []
    for step in range(own.steps):
        real, _ = own.data.batch(step)
        noise = pair.noise_scale * torch.randn(len(real), pair.noise)
        fake = generator(noise)
        if pair.discriminate or step == 0:
            loss = _judge(discriminator(real), 1.0) + _judge(discriminator(fake.detach()), 0.0)
            first.zero_grad()
            loss.backward()
            first.step()
        loss = _judge(discriminator(fake), 1.0)
        second.zero_grad()
        loss.backward()
        second.step()
        losses.append(loss.item())
    return losses


def _judge(logits: Tensor, truth: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))
