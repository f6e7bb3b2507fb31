import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
torch.set_num_threads(1)


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, z):
        return self.net(z)


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def ring(n):
    a = torch.rand(n) * 2 * math.pi
    r = 1 + 0.05 * torch.randn(n)
    return torch.stack([r * a.cos(), r * a.sin()], 1)


gen, dis = G(), D()
og = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
od = torch.optim.Adam(dis.parameters(), lr=2e-3, betas=(0.5, 0.9))
for it in range(1, 601):
    x, z = ring(128), torch.randn(128, 4)
    fake = gen(z)
    ld = F.softplus(-dis(x)).mean() + F.softplus(dis(fake.detach())).mean()
    od.zero_grad()
    ld.backward()
    od.step()
    lg = F.softplus(-dis(fake)).mean()
    og.zero_grad()
    lg.backward()
    og.step()
    if it % 100 == 0:
        with torch.no_grad():
            s = gen(torch.randn(1000, 4))
            off = (s.norm(dim=1) - 1).abs().mean().item()
        print(f"it {it} d {ld.item():.3f} g {lg.item():.3f} radial error {off:.4f}")
print("final radial error", round(off, 4))
