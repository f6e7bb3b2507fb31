"""PPO for continuous control: GAE, orthogonal init, tiny policy head, KL early stop, value clipping, return scaling."""
import torch
import torch.nn as nn
from torch.distributions import Normal


def ortho(layer, gain):
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(ortho(nn.Linear(4, 64), 2 ** 0.5), nn.Tanh(), ortho(nn.Linear(64, 64), 2 ** 0.5), nn.Tanh(),
                                   ortho(nn.Linear(64, 2), 0.01))
        self.critic = nn.Sequential(ortho(nn.Linear(4, 64), 2 ** 0.5), nn.Tanh(), ortho(nn.Linear(64, 64), 2 ** 0.5), nn.Tanh(),
                                    ortho(nn.Linear(64, 1), 1.0))
        self.log_std = nn.Parameter(torch.zeros(2))

    def dist(self, o):
        return Normal(self.actor(o), self.log_std.exp())


class PointMass:
    def __init__(self, n, seed, limit=24):
        self.g = torch.Generator().manual_seed(seed)
        self.n, self.limit = n, limit
        self.p, self.v = self.fresh(n)
        self.t = torch.randint(limit, (n,), generator=self.g)

    def fresh(self, k):
        return torch.rand(k, 2, generator=self.g) * 2 - 1, torch.zeros(k, 2)

    def obs(self):
        return torch.cat([self.p, self.v], -1)

    def step(self, a):
        a = a.clamp(-1, 1)
        self.v = 0.8 * self.v + 0.15 * a
        self.p = self.p + self.v
        self.t = self.t + 1
        r = -self.p.pow(2).sum(-1) - 0.02 * a.pow(2).sum(-1)
        d = self.t >= self.limit
        if d.any():
            self.p[d], self.v[d] = self.fresh(int(d.sum()))
            self.t[d] = 0
        return r, d.float()


def main():
    torch.manual_seed(9)
    env, agent = PointMass(32, 9), Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=1.5e-3, eps=1e-5)
    T, gamma, lam, sd = 24, 0.95, 0.9, 1.0
    for u in range(32):
        O, A, R, D, V = [], [], [], [], []
        with torch.no_grad():
            for _ in range(T):
                o = env.obs()
                a = agent.dist(o).sample()
                V.append(agent.critic(o).squeeze(-1))
                r, d = env.step(a)
                O.append(o), A.append(a), R.append(r), D.append(d)
            V.append(agent.critic(env.obs()).squeeze(-1))
            O, A, R, D, V = (torch.stack(x) for x in (O, A, R, D, V))
            sd = 0.9 * sd + 0.1 * R.std().item() / (1 - gamma) ** 0.5
            adv, run = torch.zeros(T, env.n), torch.zeros(env.n)
            for t in range(T - 1, -1, -1):
                delta = R[t] / sd + gamma * V[t + 1] * (1 - D[t]) - V[t]
                run = delta + gamma * lam * (1 - D[t]) * run
                adv[t] = run
            ret = (adv + V[:-1]).flatten()
            O, A, adv, oldv = O.flatten(0, 1), A.flatten(0, 1), adv.flatten(), V[:-1].flatten()
            old = agent.dist(O).log_prob(A).sum(-1)
        for _ in range(4):
            stop = False
            for mb in torch.randperm(len(O)).split(256):
                dist = agent.dist(O[mb])
                logr = dist.log_prob(A[mb]).sum(-1) - old[mb]
                ratio = logr.exp()
                if ((ratio - 1) - logr).mean() > 0.08:
                    stop = True
                    break
                a = (adv[mb] - adv[mb].mean()) / (adv[mb].std() + 1e-8)
                pg = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean()
                v = agent.critic(O[mb]).squeeze(-1)
                vc = oldv[mb] + (v - oldv[mb]).clamp(-0.2, 0.2)
                vl = 0.5 * torch.max((v - ret[mb]) ** 2, (vc - ret[mb]) ** 2).mean()
                loss = pg + 0.5 * vl - 0.001 * dist.entropy().sum(-1).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                opt.step()
            if stop:
                break
        if u % 8 == 0:
            print(u, round(R.mean().item(), 4))
    env = PointMass(64, 100)
    env.t = torch.zeros(64, dtype=torch.long)
    with torch.no_grad():
        return sum(env.step(agent.actor(env.obs()))[0].mean().item() for _ in range(23)) / 23


if __name__ == "__main__":
    print(main())
