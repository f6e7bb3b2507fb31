import math
import torch
import torch.nn as nn
from sklearn.datasets import make_blobs

torch.manual_seed(0)
torch.set_num_threads(1)


class AffineCoupling(nn.Module):
    def __init__(self, d, mask, h=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2 * d))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, -1)
        s = torch.tanh(s) * (1 - self.mask)
        t = t * (1 - self.mask)
        return x * s.exp() + t, s.sum(-1)


class Flow(nn.Module):
    def __init__(self, d=3, n=6):
        super().__init__()
        self.steps = nn.ModuleList()
        for i in range(n):
            m = torch.zeros(d)
            m[i % d] = 1
            m = m if i % 2 else 1 - m
            self.steps.append(AffineCoupling(d, m))

    def nll(self, x):
        ld = torch.zeros(len(x))
        for s in self.steps:
            x, l = s(x)
            ld = ld + l
        return (0.5 * x.square().sum(1) + 1.5 * math.log(2 * math.pi) - ld).mean()


X = make_blobs(3000, 3, centers=4, cluster_std=0.25, center_box=(-1, 1), random_state=3)[0]
X = torch.tensor(X, dtype=torch.float32)
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
for it in range(1, 501):
    loss = flow.nll(X[torch.randint(0, 2500, (128,))])
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
    opt.step()
    sched.step()
    if it % 100 == 0:
        with torch.no_grad():
            v = flow.nll(X[2500:]).item()
        print(f"it {it} nll {loss.item():.4f} val {v:.4f}")
print("final val nll", round(v, 4))
