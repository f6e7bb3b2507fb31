"""Soft actor-critic with automatic temperature, point mass control."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reacher:
    def __init__(self, n, seed, limit=20):
        self.g = torch.Generator().manual_seed(seed)
        self.n, self.limit = n, limit
        self.reset()

    def reset(self):
        self.p = torch.rand(self.n, 2, generator=self.g) * 2 - 1
        self.v = torch.zeros(self.n, 2)
        self.t = 0

    def obs(self):
        return torch.cat([self.p, self.v], -1)

    def step(self, a):
        self.v = 0.7 * self.v + 0.2 * a
        self.p = (self.p + self.v).clamp(-2, 2)
        self.t += 1
        r = -self.p.norm(dim=-1)
        nxt = self.obs()
        if self.t == self.limit:
            self.reset()
        return nxt, r


def mlp(i, o, h=64):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(4, 4)

    def forward(self, s):
        mu, log_std = self.net(s).chunk(2, -1)
        log_std = log_std.clamp(-5, 1)
        u = mu + log_std.exp() * torch.randn_like(mu)
        a = torch.tanh(u)
        logp = (-0.5 * ((u - mu) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)
        return a, logp, torch.tanh(mu)


class TwinQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = mlp(6, 1), mlp(6, 1)

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class SAC:
    def __init__(self, gamma=0.9, tau=0.02, lr=3e-3):
        self.actor, self.critic = Actor(), TwinQ()
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.target_entropy = -2.0
        self.gamma, self.tau = gamma, tau
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=2e-2)

    def update(self, s, a, r, s2):
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, lp2, _ = self.actor(s2)
            y = r + self.gamma * (torch.min(*self.critic_target(s2, a2)) - alpha * lp2)
        q1, q2 = self.critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()

        pi, lp, _ = self.actor(s)
        actor_loss = (alpha * lp - torch.min(*self.critic(s, pi))).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()

        alpha_loss = (self.log_alpha.exp() * (lp.detach() + self.target_entropy)).mean()
        self.alpha_opt.zero_grad()
        alpha_loss.backward()
        self.alpha_opt.step()

        with torch.no_grad():
            for p, t in zip(self.critic.parameters(), self.critic_target.parameters()):
                t.mul_(1 - self.tau).add_(self.tau * p)
        return critic_loss.item(), actor_loss.item()


def main():
    torch.manual_seed(4)
    env, agent = Reacher(32, 4), SAC()
    S, A, R, S2 = [], [], [], []
    s = env.obs()
    for step in range(260):
        with torch.no_grad():
            a = torch.rand(32, 2) * 2 - 1 if step < 20 else agent.actor(s)[0]
        s2, r = env.step(a)
        S.append(s), A.append(a), R.append(r), S2.append(s2)
        s = env.obs()
        if step >= 20:
            n = len(S)
            ti, ei = torch.randint(n, (128,)), torch.randint(32, (128,))
            pick = lambda buf: torch.stack(buf)[ti, ei]
            c, p = agent.update(pick(S), pick(A), pick(R), pick(S2))
            if step % 60 == 0:
                print(f"step {step} critic {c:.3f} actor {p:.3f}")
    env = Reacher(100, 77)
    total = 0.0
    with torch.no_grad():
        for _ in range(19):
            total += env.step(agent.actor(env.obs())[0])[1].mean().item()
    return total / 19


if __name__ == "__main__":
    print(main())
