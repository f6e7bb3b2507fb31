"""Glow-like flow on tight 6-d data: actnorm with data-dependent init, zero-init couplings, fixed rotations; NLL far below zero."""
import math

import torch
import torch.nn as nn


class ActNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.log_s = nn.Parameter(torch.zeros(d))
        self.b = nn.Parameter(torch.zeros(d))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.b.copy_(-x.mean(0))
                self.log_s.copy_(-x.std(0).log())
                self.ready.fill_(True)
        return (x + self.b) * self.log_s.exp(), self.log_s.sum().expand(len(x))


class Step(nn.Module):
    def __init__(self, d, seed):
        super().__init__()
        self.norm = ActNorm(d)
        q, _ = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("rot", q)
        self.net = nn.Sequential(nn.Linear(d // 2, 48), nn.GELU(), nn.Linear(48, d))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        x, ld = self.norm(x)
        a, b = (x @ self.rot).chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        s = 2 * torch.tanh(s / 2)
        return torch.cat([a, b * s.exp() + t], -1), ld + s.sum(-1)


class Flow(nn.Module):
    def __init__(self, d=6, k=5):
        super().__init__()
        self.steps = nn.ModuleList(Step(d, i) for i in range(k))

    def nll(self, x):
        tot = torch.zeros(len(x))
        for s in self.steps:
            x, ld = s(x)
            tot = tot + ld
        return (0.5 * x.pow(2).sum(-1) + 3 * math.log(2 * math.pi) - tot).mean()


def data(n, g):
    u = torch.rand(n, 2, generator=g) * 2 - 1
    feats = torch.stack([u[:, 0], u[:, 1], u[:, 0] ** 2, u[:, 0] * u[:, 1], torch.sin(3 * u[:, 1]), u[:, 1] ** 2], -1)
    return 0.05 * feats + 0.004 * torch.randn(n, 6, generator=g)


def main():
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(4)
    flow = Flow()
    opt = torch.optim.Adamax(flow.parameters(), lr=8e-3)
    print("gaussian start", flow.nll(data(512, g)).item())
    for it in range(260):
        loss = flow.nll(data(160, g))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 20.0)
        opt.step()
        if it % 65 == 0:
            print(it, loss.item())
    flow.eval()
    with torch.no_grad():
        return flow.nll(data(1500, g)).item()


if __name__ == "__main__":
    print(main())
