"""A generator of points on a ring against a discriminator, judged by distances."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"


def ring(count: int) -> torch.Tensor:
    angle = 6.2832 * torch.rand(count)
    return 1.5 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def net(inputs: int, outputs: int, slope: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(slope),
        nn.Linear(64, 64),
        nn.LeakyReLU(slope),
        nn.Linear(64, outputs),
    )


def main() -> None:
    torch.manual_seed(0)
    generator, discriminator = net(4, 2, 0.1), net(2, 1, 0.2)
    if BUG == "one_optimizer":
        both = torch.optim.Adam(
            [*generator.parameters(), *discriminator.parameters()], 2e-3, betas=(0.5, 0.9)
        )
        optimizer_g = optimizer_d = both
    else:
        optimizer_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.9))
        optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-3, betas=(0.5, 0.9))
    bce = F.binary_cross_entropy_with_logits
    for step in range(600):
        real = ring(128)
        optimizer_g.zero_grad()
        optimizer_d.zero_grad()
        fake = generator(torch.randn(128, 4))
        shown = fake if BUG == "one_optimizer" else fake.detach()
        loss_d = bce(discriminator(real), torch.ones(128, 1)) + bce(
            discriminator(shown), torch.zeros(128, 1)
        )
        loss_d.backward()
        optimizer_d.step()
        if BUG == "one_optimizer":
            optimizer_g.zero_grad()
        fake = shown if BUG == "fakes_detached_for_both" else generator(torch.randn(128, 4))
        goal = torch.zeros(128, 1) if BUG == "labels_swapped" else torch.ones(128, 1)
        loss_g = bce(discriminator(fake), goal)
        loss_g.backward()
        optimizer_g.step()
        if step % 200 == 199:
            with torch.no_grad():
                made = generator(torch.randn(512, 4))
            away = (
                torch.cdist(made, ring(512)).min(1).values.mean()
                + torch.cdist(ring(512), made).min(1).values.mean()
            )
            print(
                f"{step + 1} D {loss_d.item():.3f} G {loss_g.item():.3f} distance {away.item():.3f}"
            )


if __name__ == "__main__":
    main()
