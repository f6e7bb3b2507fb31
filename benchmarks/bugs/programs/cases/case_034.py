import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(3)
torch.set_num_threads(1)


class Pole:
    """batched cart-pole style balance with simplified dynamics"""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.th, self.w = (torch.rand(self.n) - 0.5) * 0.2, torch.zeros(self.n)
        return torch.stack([self.th * 5, self.w * 2], 1)

    def step(self, a):
        self.w = self.w + 0.08 * self.th + 0.02 * (a.float() * 2 - 1) + 0.005 * torch.randn(self.n)
        self.th = self.th + self.w
        return torch.stack([self.th * 5, self.w * 2], 1), self.th.abs() < 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, o):
        return Categorical(logits=self.net(o))


env, pi = Pole(16), Policy()
opt = torch.optim.Adam(pi.parameters(), lr=1e-2)
for it in range(1, 121):
    o, alive = env.reset(), torch.ones(16, dtype=torch.bool)
    logp, rew, mask = [], [], []
    for t in range(50):
        d = pi(o)
        a = d.sample()
        logp.append(d.log_prob(a))
        mask.append(alive.float())
        o, ok = env.step(a)
        alive = alive & ok
        rew.append(alive.float())
        if not alive.any():
            break
    G, out = torch.zeros(16), []
    for r in reversed(rew):
        G = r + 0.98 * G
        out.append(G)
    G = torch.stack(out[::-1])
    M = torch.stack(mask)
    n = M.sum()
    mean = (G * M).sum() / n
    std = (((G - mean) ** 2 * M).sum() / n).sqrt()
    adv = (G - mean) / (std + 1e-6)
    loss = -(torch.stack(logp) * adv * M).sum() / n
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 20 == 0:
        print(f"iter {it} loss {loss.item():+.4f} mean length {M.sum(0).mean().item():.1f}")
print("final mean length", round(M.sum(0).mean().item(), 2))
