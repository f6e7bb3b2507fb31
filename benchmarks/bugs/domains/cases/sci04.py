"""RealNVP density estimation on two moons; reports the energy distance between samples and data."""
import math

import torch
import torch.nn as nn


def moons(n, g):
    t = torch.rand(n, generator=g) * math.pi
    up = torch.rand(n, generator=g) < 0.5
    x = torch.where(up, t.cos(), 1 - t.cos())
    y = torch.where(up, t.sin(), 0.5 - t.sin())
    pts = torch.stack([x - 0.5, y - 0.25], -1)
    return pts + 0.07 * torch.randn(n, 2, generator=g)


class Coupling(nn.Module):
    def __init__(self, flip, hidden=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def params(self, a):
        s, t = self.net(a).chunk(2, -1)
        return torch.tanh(s) * 1.5, t

    def forward(self, x):
        a, b = x.flip(-1).chunk(2, -1) if self.flip else x.chunk(2, -1)
        s, t = self.params(a)
        b = b * torch.exp(s) + t
        z = torch.cat([a, b], -1)
        return (z.flip(-1) if self.flip else z), s.sum(-1)

    def inverse(self, z):
        a, b = z.flip(-1).chunk(2, -1) if self.flip else z.chunk(2, -1)
        s, t = self.params(a)
        b = (b - t) * torch.exp(-s)
        x = torch.cat([a, b], -1)
        return x.flip(-1) if self.flip else x


class RealNVP(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(layers))

    def log_prob(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        base = -0.5 * (x ** 2).sum(-1) - math.log(2 * math.pi)
        return base - logdet

    @torch.no_grad()
    def sample(self, n, g):
        z = torch.randn(n, 2, generator=g)
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return z


def main():
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(3)
    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=3e-3, weight_decay=1e-5)
    for it in range(280):
        loss = -flow.log_prob(moons(192, g)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        if it % 70 == 0:
            print(f"{it} nll {loss.item():.4f}")
    a, b = flow.sample(800, g), moons(800, g)
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


if __name__ == "__main__":
    print(main())
