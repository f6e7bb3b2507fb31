"""Proximal policy optimization for a two-dimensional thruster that has to reach and hold a target."""
import os
import sys

import torch
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
N, T, EPISODE = 64, 32, 32
GAMMA, LAM = 0.95, 0.9


class Thruster:
    """State: offset to the target and velocity; wind blows depending on the place."""

    def __init__(self, n, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.n = n
        self.reset()

    def reset(self):
        self.pos = torch.rand(self.n, 2, generator=self.gen) * 4 - 2
        self.vel = torch.zeros(self.n, 2)
        self.t = 0
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.vel], 1)

    def step(self, act):
        force = act.clamp(-1, 1)
        wind = 0.3 * torch.stack([torch.sin(self.pos[:, 1]), torch.cos(self.pos[:, 0])], 1)
        self.vel = 0.9 * self.vel + 0.3 * (force + wind)
        self.pos = self.pos + 0.3 * self.vel
        self.t += 1
        reward = -self.pos.norm(dim=1) - 0.05 * force.square().sum(1)
        over = self.t >= EPISODE
        obs = self.reset() if over else self.obs()
        return obs, reward, over


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, obs):
        return Independent(Normal(self.net(obs), self.log_std.exp()), 1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))

    def forward(self, obs):
        return self.net(obs).squeeze(-1)


@torch.no_grad()
def evaluate(actor, seed):
    actor.eval()
    env = Thruster(200, seed)
    obs, total = env.obs(), torch.zeros(200)
    for _ in range(EPISODE):
        obs, rew, _ = env.step(actor(obs).mean)
        total += rew
    actor.train()
    return total.mean().item()


def advantages(rew, val, last, over):
    adv, run = torch.zeros_like(rew), torch.zeros(rew.shape[1])
    steps = range(T) if CASE == "h2" else reversed(range(T))
    for t in steps:
        nxt = last if t == T - 1 else val[t + 1]
        live = 0.0 if over[t] else 1.0
        delta = rew[t] + GAMMA * nxt * live - val[t]
        run = delta + GAMMA * LAM * live * run
        adv[t] = run
    return adv, adv + val


def main():
    torch.manual_seed(SEED)
    env = Thruster(N, SEED)
    actor, critic = Actor(), Critic()
    if CASE == "h3":
        opt_a = torch.optim.Adam(critic.parameters(), lr=2e-3)
    else:
        opt_a = torch.optim.Adam(actor.parameters(), lr=2e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3)
    iters = 40
    sched = torch.optim.lr_scheduler.LinearLR(opt_a, 1.0, 0.2, total_iters=iters)
    obs = env.obs()
    for it in range(iters):
        buf = {k: [] for k in ("obs", "act", "logp", "rew", "val", "mean")}
        over_at = []
        for _ in range(T):
            with torch.no_grad():
                dist, val = actor(obs), critic(obs)
                act = dist.sample()
            nxt, rew, over = env.step(act)
            for k, v in zip(buf, (obs, act, dist.log_prob(act), rew, val, dist.mean)):
                buf[k].append(v)
            over_at.append(over)
            obs = nxt
        with torch.no_grad():
            last = critic(obs)
        b = {k: torch.stack(v) for k, v in buf.items()}
        adv, ret = advantages(b["rew"], b["val"], last, over_at)
        if CASE == "h1":
            adv = adv.t().reshape(-1)
        else:
            adv = adv.reshape(-1)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        flat = {k: v.flatten(0, 1) for k, v in b.items()}
        ret = ret.flatten()
        old_std = actor.log_std.detach().exp()
        for _ in range(3):
            for idx in torch.randperm(N * T).chunk(4):
                dist = actor(flat["obs"][idx])
                ratio = (dist.log_prob(flat["act"][idx]) - flat["logp"][idx]).exp()
                a = adv[idx]
                if CASE == "variant_x":                        # penalty form instead of clipping
                    old = Independent(Normal(flat["mean"][idx], old_std), 1)
                    gain = (ratio * a).mean() - 0.5 * kl_divergence(old, dist).mean()
                else:
                    gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
                if CASE == "h4":
                    loss_a = gain - 0.003 * dist.entropy().mean()
                else:
                    loss_a = -gain - 0.003 * dist.entropy().mean()
                opt_a.zero_grad()
                loss_a.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                opt_a.step()
                loss_c = (critic(flat["obs"][idx]) - ret[idx]).square().mean()
                opt_c.zero_grad()
                loss_c.backward()
                opt_c.step()
        sched.step()
        if it % 10 == 9:
            print("iter %d  value loss %.3f  reward %.3f  eval return %.2f"
                  % (it + 1, loss_c.item(), b["rew"].mean().item(), evaluate(actor, 77)))
    print("final evaluation return %.3f" % evaluate(actor, 99))


if __name__ == "__main__":
    main()
