"""Denoising diffusion of points on a ring of eight blobs, judged by distances."""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
STEPS = 100


def ring(count: int) -> torch.Tensor:
    angle = torch.randint(0, 8, (count,)) * math.pi / 4
    return 1.5 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 96))
        self.enter, self.leave = nn.Linear(2, 96), nn.Linear(96, 2)
        self.hidden = nn.ModuleList([nn.Linear(96, 96) for _ in range(3)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t.float()[:, None] * torch.logspace(0, -2, 8)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.enter(x)
        for layer in self.hidden:
            x = x + layer(F.silu(x if BUG == "noise_level_not_given" else x + time))
        return self.leave(x)


def main() -> None:
    torch.manual_seed(0)
    betas = torch.linspace(1e-4, 0.08, STEPS)
    alphas = 1 - betas
    alpha_bar = alphas.cumprod(0)
    net = Denoiser()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(300):
        x, t = ring(256), torch.randint(0, STEPS, (256,))
        noise = torch.rand_like(x) if BUG == "uniform_noise" else torch.randn_like(x)
        kept = alpha_bar[t][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        target = x if BUG == "clean_as_target" else noise
        loss = F.mse_loss(net(noisy, t), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            with torch.no_grad():
                y = torch.randn(512, 2)
                for t_now in reversed(range(STEPS)):
                    guess = net(y, torch.full((512,), t_now))
                    y = (y - betas[t_now] / (1 - alpha_bar[t_now]).sqrt() * guess) / alphas[
                        t_now
                    ].sqrt()
                    if t_now:
                        y = y + betas[t_now].sqrt() * torch.randn_like(y)
            away = (
                torch.cdist(y, ring(512)).min(1).values.mean()
                + torch.cdist(ring(512), y).min(1).values.mean()
            )
            print(f"{step + 1} loss {loss.item():.3f} distance {away.item():.3f}")


if __name__ == "__main__":
    main()
