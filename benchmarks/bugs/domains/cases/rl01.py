"""PPO on a vectorised game of Catch."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Catch:
    """A ball falls from the top of a 7x7 board; move the paddle left, stay, right."""

    def __init__(self, n, seed):
        self.n, self.h, self.w = n, 7, 7
        self.rng = np.random.RandomState(seed)
        self.row = self.rng.randint(0, 4, n)
        self.col = self.rng.randint(0, 7, n)
        self.pad = self.rng.randint(0, 7, n)

    def obs(self):
        o = np.zeros((self.n, 3, 7), "float32")
        i = np.arange(self.n)
        o[i, 0, self.row] = 1
        o[i, 1, self.col] = 1
        o[i, 2, self.pad] = 1
        return torch.from_numpy(o.reshape(self.n, -1))

    def step(self, a):
        self.pad = np.clip(self.pad + a - 1, 0, 6)
        self.row = self.row + 1
        done = self.row == 6
        r = np.where(done, np.where(np.abs(self.pad - self.col) == 0, 1.0, -1.0), 0.0)
        k = done.sum()
        self.row[done] = 0
        self.col[done] = self.rng.randint(0, 7, k)
        self.pad[done] = self.rng.randint(0, 7, k)
        return self.obs(), torch.tensor(r, dtype=torch.float32), torch.tensor(done, dtype=torch.float32)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(21, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi = nn.Linear(64, 3)
        self.v = nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def gae(rewards, values, dones, last_value, gamma=0.97, lam=0.95):
    T, N = rewards.shape
    adv = torch.zeros(N, T)
    run = torch.zeros(N)
    for t in reversed(range(T)):
        nxt = last_value if t == T - 1 else values[t + 1]
        delta = rewards[t] + gamma * nxt * (1 - dones[t]) - values[t]
        run = delta + gamma * lam * (1 - dones[t]) * run
        adv[:, t] = run
    return adv, adv + values.T


def main():
    torch.manual_seed(0)
    T, N, UPDATES, EPOCHS, MB = 24, 32, 36, 4, 384
    env = Catch(N, 0)
    agent = Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    o = env.obs()
    score = 0.0
    for u in range(UPDATES):
        for grp in opt.param_groups:
            grp["lr"] = 3e-3 * (1 - 0.8 * u / UPDATES)
        buf = {k: [] for k in ("obs", "act", "logp", "rew", "done", "val")}
        with torch.no_grad():
            for _ in range(T):
                dist, v = agent(o)
                a = dist.sample()
                nxt, r, d = env.step(a.numpy())
                for k, x in zip(buf, (o, a, dist.log_prob(a), r, d, v)):
                    buf[k].append(x)
                o = nxt
            _, last = agent(o)
        b = {k: torch.stack(x) for k, x in buf.items()}
        adv, ret = gae(b["rew"], b["val"], b["done"], last)
        flat_obs, flat_act, flat_logp = b["obs"].reshape(T * N, -1), b["act"].reshape(-1), b["logp"].reshape(-1)
        flat_adv, flat_ret = adv.reshape(-1), ret.reshape(-1)
        for _ in range(EPOCHS):
            for mb in torch.randperm(T * N).split(MB):
                dist, v = agent(flat_obs[mb])
                ratio = (dist.log_prob(flat_act[mb]) - flat_logp[mb]).exp()
                A = flat_adv[mb]
                A = (A - A.mean()) / (A.std() + 1e-8)
                pg = -torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()
                vl = 0.5 * (v - flat_ret[mb]).pow(2).mean()
                loss = pg + 0.5 * vl - 0.01 * dist.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                opt.step()
        score = (b["rew"].sum() / b["done"].sum()).item()
        if u % 9 == 0:
            print(f"update {u} reward/episode {score:.3f}")
    return score


if __name__ == "__main__":
    print(main())
