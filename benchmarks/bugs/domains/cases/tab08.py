"""Domain-adversarial training (gradient reversal) on shifted tabular data."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.lam * grad, None


class DANN(nn.Module):
    def __init__(self, dim=20, hid=64):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(dim, hid), nn.ReLU(), nn.Linear(hid, 16), nn.ReLU())
        self.label = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        self.domain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, lam=0.0):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, lam)).squeeze(-1)


CENTRES = torch.randn(3, 10, generator=torch.Generator().manual_seed(6)) * 1.3


def draw(n, target, g):
    y = torch.randint(3, (n,), generator=g)
    core = CENTRES[y] + 0.8 * torch.randn(n, 10, generator=g)
    if target:
        spurious = torch.randn(n, 10, generator=g) + 1.5
    else:
        spurious = torch.randn(n, 10, generator=g) * 0.6 - 1.0
        spurious[:, :3] += 2.0 * F.one_hot(y, 3)
    return torch.cat([core, spurious], 1), y


def main():
    torch.manual_seed(12)
    g = torch.Generator().manual_seed(12)
    net = DANN()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3, nesterov=True)
    steps = 250
    for s in range(steps):
        p = s / steps
        lam = 2 / (1 + math.exp(-10 * p)) - 1
        for group in opt.param_groups:
            group["lr"] = 0.02 / (1 + 10 * p) ** 0.75
        xs, ys = draw(64, False, g)
        xt, _ = draw(64, True, g)
        cls, ds = net(xs, lam)
        _, dt = net(xt, lam)
        dom = F.binary_cross_entropy_with_logits(torch.cat([ds, dt]), torch.cat([torch.ones(64), torch.zeros(64)]))
        loss = F.cross_entropy(cls, ys) + dom
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 50 == 0:
            print(s, round(loss.item(), 4), round(dom.item(), 4))
    net.eval()
    x, y = draw(1500, True, g)
    with torch.no_grad():
        return (net(x)[0].argmax(-1) == y).float().mean().item()


if __name__ == "__main__":
    print(main())
