import copy
import math
import torch
import torch.nn as nn
from sklearn.datasets import make_swiss_roll

torch.manual_seed(0)
torch.set_num_threads(1)
T = 50
beta = torch.linspace(1e-3, 0.18, T)
alpha = 1 - beta
abar = alpha.cumprod(0)


def time_embedding(t, dim=32):
    f = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    a = t[:, None].float() * f[None]
    return torch.cat([a.sin(), a.cos()], 1)


class EpsNet(nn.Module):
    def __init__(self, h=96):
        super().__init__()
        self.inp, self.t = nn.Linear(2, h), nn.Linear(32, h)
        self.mid = nn.ModuleList([nn.Linear(h, h) for _ in range(2)])
        self.out = nn.Linear(h, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        h = self.inp(x) + self.t(time_embedding(t))
        for m in self.mid:
            h = h + m(torch.nn.functional.silu(h))
        return self.out(torch.nn.functional.silu(h))


pts = make_swiss_roll(3000, noise=0.3, random_state=0)[0][:, [0, 2]]
data = torch.tensor(pts, dtype=torch.float32)
data = (data - data.mean(0)) / data.std(0)
net = EpsNet()
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for step in range(1, 601):
    x0 = data[torch.randint(len(data), (256,))]
    t = torch.randint(T, (256,))
    e = torch.randn_like(x0)
    xt = abar[t, None].sqrt() * x0 + (1 - abar[t, None]).sqrt() * e
    loss = (net(xt, t) - e).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), net.parameters()):
            a.lerp_(b, 0.02)
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    x = torch.randn(1000, 2)
    for i in reversed(range(T)):
        eps = ema(x, torch.full((1000,), i))
        x = (x - beta[i] / (1 - abar[i]).sqrt() * eps) / alpha[i].sqrt()
        if i:
            x += beta[i].sqrt() * torch.randn_like(x)
    m = torch.cdist(x, data)
print("final chamfer", round((m.min(1).values.mean() + m.min(0).values.mean()).item(), 4))
