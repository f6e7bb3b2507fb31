"""BYOL with a momentum target whose rate follows a cosine."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

gen = torch.Generator().manual_seed(2)
CENTRES = torch.randn(5, 8, generator=gen) * 1.2
MIX = torch.randn(8, 24, generator=gen) / 8 ** 0.5
NUIS = torch.randn(6, 24, generator=gen) / 6 ** 0.5


def draw(n):
    y = torch.randint(5, (n,), generator=gen)
    return (CENTRES[y] + 0.5 * torch.randn(n, 8, generator=gen)) @ MIX, y


def aug(x):
    return x + 1.2 * torch.randn(len(x), 6, generator=gen) @ NUIS + 0.15 * torch.randn(x.shape, generator=gen)


class Online(nn.Module):
    def __init__(self, hid=64, out=32):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(24, hid), nn.BatchNorm1d(hid), nn.ReLU(), nn.Linear(hid, hid))
        self.g = nn.Sequential(nn.BatchNorm1d(hid), nn.ReLU(), nn.Linear(hid, out))

    def forward(self, x):
        return self.g(self.f(x))


@torch.no_grad()
def probe(net):
    net.eval()
    xa, ya = draw(600)
    xb, yb = draw(300)
    ha, hb = F.normalize(net.f(aug(xa)), dim=-1), F.normalize(net.f(aug(xb)), dim=-1)
    acc = (ya[(hb @ ha.T).topk(9).indices].mode(-1).values == yb).float().mean().item()
    net.train()
    return acc


def main():
    torch.manual_seed(3)
    online = Online()
    predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    target = copy.deepcopy(online)
    for p in target.parameters():
        p.requires_grad = False
    opt = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.2, momentum=0.9, weight_decay=5e-4)
    print("before", probe(online))
    steps = 250
    for s in range(steps):
        x, _ = draw(128)
        a, b = aug(x), aug(x)
        pa, pb = predictor(online(a)), predictor(online(b))
        with torch.no_grad():
            ta, tb = target(a), target(b)
        loss = 2 - F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        m = 1 - 0.04 * (math.cos(math.pi * s / steps) + 1) / 2
        with torch.no_grad():
            for p, t in zip(online.parameters(), target.parameters()):
                t.mul_(m).add_(p, alpha=1 - m)
        if s % 50 == 0:
            print(s, loss.item())
    return probe(online)


if __name__ == "__main__":
    print(main())
