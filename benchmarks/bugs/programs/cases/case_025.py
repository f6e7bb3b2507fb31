import torch
import torch.nn as nn
import torch.nn.functional as F


class Chase:
    """agent on a ring of 12 cells follows a drifting target"""

    def __init__(self, n):
        self.n = n
        self.a, self.t = torch.randint(0, 12, (n,)), torch.randint(0, 12, (n,))

    def obs(self):
        return torch.cat([F.one_hot(self.a, 12), F.one_hot(self.t, 12)], 1).float()

    def step(self, act):
        self.a = (self.a + act - 1) % 12
        drift = (torch.rand(self.n) < 0.2).long()
        self.t = (self.t + drift) % 12
        gap = (self.a - self.t).abs()
        gap = torch.minimum(gap, 12 - gap)
        return self.obs(), (gap == 0).float() - 0.05


class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.pi, self.v = nn.Linear(64, 3), nn.Linear(64, 1)
        nn.init.zeros_(self.pi.weight)
        nn.init.zeros_(self.pi.bias)

    def forward(self, o):
        h = self.trunk(o)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(1)


class A2C:
    def __init__(self, n=32, horizon=5, gamma=0.9):
        self.env, self.net, self.k, self.g = Chase(n), AC(), horizon, gamma
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=1.5e-3, alpha=0.99, eps=1e-5)

    def iterate(self):
        o = self.env.obs()
        lp, vs, rs, ent = [], [], [], []
        for _ in range(self.k):
            d, v = self.net(o)
            a = d.sample()
            lp.append(d.log_prob(a))
            vs.append(v)
            ent.append(d.entropy())
            o, r = self.env.step(a)
            rs.append(r)
        with torch.no_grad():
            R = self.net(o)[1]
        ret = []
        for r in reversed(rs):
            R = r + self.g * R
            ret.insert(0, R)
        ret, vs, lp, ent = torch.stack(ret), torch.stack(vs), torch.stack(lp), torch.stack(ent)
        adv = (ret - vs).detach()
        loss = -(lp * adv).mean() + 0.5 * F.mse_loss(vs, ret) - 0.02 * ent.mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.25)
        self.opt.step()
        return loss.item(), torch.stack(rs).mean().item()


torch.manual_seed(0)
torch.set_num_threads(1)
agent, hist = A2C(), []
for it in range(1, 401):
    l, r = agent.iterate()
    hist.append(r)
    if it % 50 == 0:
        print(f"update {it} loss {l:.4f} reward {sum(hist[-25:]) / 25:.4f}")
print("final reward per step", round(sum(hist[-40:]) / 40, 4))
