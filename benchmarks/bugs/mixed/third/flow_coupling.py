"""Affine-coupling flow for a six-dimensional distribution; judged by the energy distance of its samples."""
import math
import os
import sys

import torch
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
D = 6


def draw(n, gen):
    """Two moons, a ring whose radius follows the moon, and two curved coordinates."""
    side = (torch.rand(n, generator=gen) < 0.5).float()
    ang = math.pi * torch.rand(n, generator=gen)
    mx = torch.where(side > 0, 1 - ang.cos(), ang.cos())
    my = torch.where(side > 0, 0.5 - ang.sin(), ang.sin())
    th = 2 * math.pi * torch.rand(n, generator=gen)
    rad = 1 + side
    e = torch.randn(n, 4, generator=gen)
    x = torch.stack([mx + 0.08 * e[:, 0], my + 0.08 * e[:, 1], rad * th.cos(), rad * th.sin(),
                     e[:, 2], 0.5 * e[:, 2] ** 2 - 1 + 0.3 * e[:, 3]], 1)
    return x + 0.05 * torch.randn(n, D, generator=gen)


class Coupling(nn.Module):
    def __init__(self, mask, width=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(D, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, 2 * D))
        nn.init.normal_(self.net[-1].weight, std=0.01)
        nn.init.zeros_(self.net[-1].bias)

    def params(self, kept):
        s, t = self.net(kept).chunk(2, -1)
        free = 1 - self.mask
        return 2 * torch.tanh(s / 2) * free, t * free

    def forward(self, x):
        s, t = self.params(x * self.mask)
        return x * s.exp() + t, s.sum(1)

    def inverse(self, z):
        s, t = self.params(z * self.mask)
        return (z - t) * (-s).exp()


class ActNorm(nn.Module):
    """Per-dimension scale and shift, set from the first batch."""

    def __init__(self):
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.shift.data = -x.mean(0).detach()
            self.log_scale.data = -x.std(0).log().detach()
            self.ready = True
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))

    def inverse(self, z):
        return z * (-self.log_scale).exp() - self.shift


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        base = (torch.arange(D) % 2).float()
        layers = []
        for k in range(depth):
            if CASE == "variant_x":
                layers.append(ActNorm())
            flip = k % 2 == 1 and CASE != "j2"
            layers.append(Coupling(1 - base if flip else base))
        self.layers = nn.ModuleList(layers)

    def log_prob(self, x):
        total = 0.0
        for layer in self.layers:
            x, ld = layer(x)
            total = total + ld
        prior = -0.5 * x.square() - 0.5 * math.log(2 * math.pi)
        if CASE == "j1":
            return prior.sum(1) - total
        if CASE == "j4":
            return prior.mean(1) + total
        return prior.sum(1) + total

    def forward(self, x):
        return -self.log_prob(x).mean()

    @torch.no_grad()
    def sample(self, n):
        z = torch.randn(n, D)
        layers = self.layers if CASE == "j3" else reversed(self.layers)
        for layer in layers:
            z = layer.inverse(z)
        return z


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main():
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED + 10)
    train, test = draw(8000, gen), draw(1500, gen)
    mu, sd = train.mean(0), train.std(0)
    train, test = (train - mu) / sd, (test - mu) / sd
    print("normal baseline %.4f" % energy_distance(torch.randn(1500, D), test))
    flow = Flow()
    opt = torch.optim.Adam(flow.parameters(), lr=3e-3)
    steps, sched = 700, None
    if CASE == "variant_x":
        opt = torch.optim.AdamW(flow.parameters(), lr=4e-3, amsgrad=True)
        warm = torch.optim.lr_scheduler.LinearLR(opt, 0.05, 1.0, total_iters=50)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps - 50)
        sched = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cosine], [50])
    for step in range(steps):
        loss = flow(train[torch.randint(len(train), (256,))])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        if sched is not None:
            sched.step()
        if step % 140 == 139:
            flow.eval()
            with torch.no_grad():
                nll = flow(test).item()
            print("step %d  loss %.3f  held-out nll %.3f  energy %.4f"
                  % (step + 1, loss.item(), nll, energy_distance(flow.sample(1500), test)))
            flow.train()
    flow.eval()
    print("final energy distance of samples %.5f" % energy_distance(flow.sample(1500), test))


if __name__ == "__main__":
    main()
