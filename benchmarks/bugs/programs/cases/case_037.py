import math
import torch
from torch import nn
from sklearn.datasets import make_moons


class Coupling(nn.Module):
    def __init__(self, flip, h=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))

    def forward(self, x):
        a, b = x[:, :1], x[:, 1:]
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = 2 * torch.tanh(s)
        b = b * torch.exp(s) + t
        out = torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)
        return out, s.sum(1)


class RealNVP(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(n))

    def forward(self, x):
        total = 0
        for l in self.layers:
            x, ld = l(x)
            total = total + ld
        return x, total

    def log_prob(self, x):
        z, ld = self(x)
        logpz = -0.5 * (z ** 2).sum(1) - math.log(2 * math.pi)
        return logpz - ld


torch.manual_seed(2)
torch.set_num_threads(1)
X = torch.tensor(make_moons(3000, noise=0.07, random_state=1)[0], dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
Xtr, Xte = X[:2500], X[2500:]
flow = RealNVP()
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
for it in range(1, 501):
    x = Xtr[torch.randint(len(Xtr), (128,))]
    loss = -flow.log_prob(x).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
    opt.step()
    if it % 100 == 0:
        flow.eval()
        with torch.no_grad():
            z, ld = flow(Xte)
            nll = (0.5 * (z ** 2).sum(1) + math.log(2 * math.pi) - ld).mean().item()
        flow.train()
        print(f"it {it} loss {loss.item():.4f} held-out bits {nll / math.log(2):.4f}")
print("final held-out nll", round(nll, 4))
