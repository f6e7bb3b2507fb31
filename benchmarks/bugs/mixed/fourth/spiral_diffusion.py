"""Denoising diffusion on a two-dimensional data set of spirals."""
import math
import os
import sys

import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

STEPS = 60


def spirals(n):
    """Three spiral arms, standardised."""
    arm = torch.randint(3, (n,)) * 2 * math.pi / 3
    u = torch.rand(n).sqrt()
    angle, radius = arm + 2.8 * u, 2.2 * u
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return (points + 0.04 * torch.randn(n, 2)) / 1.1


def schedule():
    if CASE == "variant_x":
        t = torch.arange(STEPS + 1) / STEPS
        bar = torch.cos((t + 0.01) / 1.01 * math.pi / 2) ** 2
        betas = (1 - bar[1:] / bar[:-1]).clamp(max=0.95)
    else:
        betas = torch.linspace(1e-3, 0.16, STEPS)
    return betas, 1 - betas, torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, hidden=96, waves=12):
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.linspace(0, math.log(60), waves)))
        self.enter = nn.Linear(2, hidden)
        self.time = nn.Sequential(nn.Linear(2 * waves, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.leave = nn.Linear(hidden, 2)

    def forward(self, x, t):
        fraction = (t // STEPS).float() if CASE == "case_c" else t / STEPS
        waves = fraction.unsqueeze(1) * self.rates
        when = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        h = self.enter(x)
        for layer in self.layers:
            h = h + layer(torch.nn.functional.silu(h + when))
        return self.leave(torch.nn.functional.silu(h))


@torch.no_grad()
def generate(model, n):
    model.eval()
    betas, alphas, bar = schedule()
    x = torch.randn(n, 2)
    for t in reversed(range(STEPS)):
        output = model(x, torch.full((n,), t))
        if CASE == "variant_x":
            output = bar[t].sqrt() * output + (1 - bar[t]).sqrt() * x
        x = (x - betas[t] / (1 - bar[t]).sqrt() * output) / alphas[t].sqrt()
        if t > 0:
            x = x + betas[t].sqrt() * torch.randn_like(x)
    model.train()
    return x


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item() * 100


def main():
    torch.manual_seed(SEED)
    train, test = spirals(8000), spirals(1500)
    _, alphas, bar = schedule()
    level = alphas if CASE == "case_b" else bar
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    decay = 0.9999 if CASE == "case_d" else 0.98
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    final = average
    for step in range(900):
        x = train[torch.randint(len(train), (256,))]
        t = torch.randint(STEPS, (256,))
        if CASE == "variant_x":
            t = torch.cat([t[:128], STEPS - 1 - t[:128]])
        noise = torch.randn_like(x)
        keep, add = level[t].sqrt().unsqueeze(1), (1 - level[t]).sqrt().unsqueeze(1)
        noisy = keep * x + add * noise
        goal = torch.randn_like(x) if CASE == "case_a" else noise
        if CASE == "variant_x":
            goal = keep * noise - add * x
        loss = (model(noisy, t) - goal).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        if (step + 1) % 180 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} distance {energy_distance(generate(final, 800), test):.3f}")
    print(f"final distance {energy_distance(generate(final, 3000), test):.4f}")


if __name__ == "__main__":
    main()
