"""TD3 on a pendulum-like swing: twin critics, target smoothing, delayed actor updates, replay."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Swing:
    def __init__(self, n, g, limit=30):
        self.n, self.g, self.limit = n, g, limit
        self.reset()

    def reset(self):
        self.th = (torch.rand(self.n, generator=self.g) * 2 - 1) * 1.2
        self.w = torch.zeros(self.n)
        self.t = 0

    def obs(self):
        return torch.stack([self.th.cos(), self.th.sin(), self.w / 4], -1)

    def step(self, a):
        self.w = (self.w + 0.1 * (6.0 * self.th.sin() + 8.0 * a)).clamp(-6, 6)
        self.th = self.th + 0.1 * self.w
        self.t += 1
        r = self.th.cos() - 0.02 * self.w ** 2 - 0.02 * a ** 2
        o = self.obs()
        if self.t == self.limit:
            self.reset()
        return o, r


def net(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


def main():
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    actor, q1, q2 = net(3, 1), net(4, 1), net(4, 1)
    with torch.no_grad():
        actor[-1].weight.mul_(0.01)
    ta, t1, t2 = (copy.deepcopy(m).requires_grad_(False) for m in (actor, q1, q2))
    oa = torch.optim.Adam(actor.parameters(), lr=1e-3)
    oq = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=2e-3)
    env = Swing(32, g)
    buf = []
    s = env.obs()
    for step in range(300):
        with torch.no_grad():
            a = torch.tanh(actor(s)).squeeze(-1) + 0.3 * torch.randn(32, generator=g)
        a = a.clamp(-1, 1)
        s2, r = env.step(a)
        buf.append((s, a, r, s2))
        s = env.obs()
        if step < 15:
            continue
        S, A, R, S2 = (torch.stack(c).flatten(0, 1) for c in zip(*buf))
        ix = torch.randint(len(S), (128,), generator=g)
        S, A, R, S2 = S[ix], A[ix], R[ix], S2[ix]
        with torch.no_grad():
            eps = (0.2 * torch.randn(128, generator=g)).clamp(-0.4, 0.4)
            a2 = (torch.tanh(ta(S2)).squeeze(-1) + eps).clamp(-1, 1)
            x2 = torch.cat([S2, a2[:, None]], -1)
            y = R + 0.93 * torch.min(t1(x2), t2(x2)).squeeze(-1)
        x = torch.cat([S, A[:, None]], -1)
        lq = F.mse_loss(q1(x).squeeze(-1), y) + F.mse_loss(q2(x).squeeze(-1), y)
        oq.zero_grad()
        lq.backward()
        oq.step()
        if step % 2 == 0:
            la = -q1(torch.cat([S, torch.tanh(actor(S))], -1)).mean()
            oa.zero_grad()
            la.backward()
            oa.step()
            with torch.no_grad():
                for m, t in ((actor, ta), (q1, t1), (q2, t2)):
                    for p, tp in zip(m.parameters(), t.parameters()):
                        tp.lerp_(p, 0.04)
        if step % 60 == 0:
            print(step, round(lq.item(), 4), round(la.item(), 3), round(R.mean().item(), 3))
    env = Swing(100, g)
    tot = 0.0
    with torch.no_grad():
        for _ in range(29):
            tot += env.step(torch.tanh(actor(env.obs())).squeeze(-1))[1].mean().item()
    return tot / 29


if __name__ == "__main__":
    print(main())
