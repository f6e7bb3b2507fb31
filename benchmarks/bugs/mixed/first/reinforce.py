"""Policy gradient with a learned baseline on a vectorised 'catch' game."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

ROWS, COLS, T = 7, 6, 12


class Catch:
    """Two balls fall one after the other; +1 per ball caught, -1 per ball missed, small cost for moving."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng

    def reset(self):
        self.t = 0
        self.ball = self.rng.integers(0, COLS, (2, self.n))
        self.pad = np.full(self.n, COLS // 2)
        return self.obs()

    def obs(self):
        o = np.zeros((self.n, ROWS, COLS), np.float32)
        k, row = divmod(self.t, ROWS - 1)
        i = np.arange(self.n)
        if k < 2:
            o[i, row, self.ball[k]] = 1
        o[i, ROWS - 1, self.pad] = 1
        return o.reshape(self.n, -1)

    def step(self, a):
        self.pad = np.clip(self.pad + a - 1, 0, COLS - 1)
        k, row = divmod(self.t, ROWS - 1)
        r = -0.01 * (a != 1).astype(np.float32)
        if row == ROWS - 2:
            r = r + np.where(self.pad == self.ball[k], 1.0, -1.0).astype(np.float32)
        self.t += 1
        return self.obs(), r


class Policy(nn.Module):
    def __init__(self, hid=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(ROWS * COLS, hid), nn.Tanh(), nn.Linear(hid, hid), nn.Tanh())
        self.pi = nn.Linear(hid, 3)
        self.v = nn.Linear(hid, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h), self.v(h).squeeze(-1)


def rewards_to_go(r, gamma):
    """r is (T, n)."""
    out = torch.zeros_like(r)
    acc = torch.zeros(r.shape[1])
    order = range(len(r)) if CASE == "c2" else reversed(range(len(r)))
    for t in order:
        acc = r[t] + gamma * acc
        out[t] = acc
    return out


@torch.no_grad()
def evaluate(policy, n=200):
    env = Catch(n, np.random.default_rng(99))
    o, total = env.reset(), np.zeros(n)
    for _ in range(T):
        a = policy(torch.from_numpy(o))[0].argmax(-1).numpy()
        o, r = env.step(a)
        total += r
    return total.mean()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env = Catch(48, rng)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
    gamma, iters = 0.95, 500
    for it in range(iters):
        obs, acts, rews = [], [], []
        o = env.reset()
        for _ in range(T):
            ot = torch.from_numpy(o)
            with torch.no_grad():
                a = Categorical(logits=policy(ot)[0]).sample()
            obs.append(ot)
            acts.append(a)
            o, r = env.step(a.numpy())
            rews.append(torch.from_numpy(r))
        obs, acts = torch.stack(obs), torch.stack(acts)
        ret = rewards_to_go(torch.stack(rews), gamma)
        logits, value = policy(obs.reshape(T * env.n, -1))
        dist = Categorical(logits=logits)
        if CASE == "c4":
            ret = ret.transpose(0, 1).reshape(-1)
        else:
            ret = ret.reshape(-1)
        adv = ret - value.detach()
        if CASE == "variant_x":
            adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        if CASE == "c3":
            logp = dist.log_prob(dist.sample())
        else:
            logp = dist.log_prob(acts.reshape(-1))
        ent_coef = 0.05 * (1 - it / iters) if CASE == "variant_x" else 0.01
        if CASE == "c1":
            pg = (logp * adv).mean()
        else:
            pg = -(logp * adv).mean()
        loss = pg + 0.5 * F.mse_loss(value, ret) - ent_coef * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        if it % 100 == 99:
            print(f"iter {it + 1} loss {loss.item():.4f} entropy {dist.entropy().mean().item():.3f} "
                  f"sampled return {torch.stack(rews).sum(0).mean().item():.3f} greedy return {evaluate(policy):.3f}")
    print(f"FINAL quality (greedy return, at most 2) {evaluate(policy):.4f}")


if __name__ == "__main__":
    main()
