"""Twin-critic deterministic actor-critic on a 2-D point mass that has to reach and hold a goal."""
import copy
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

T, OBS, ACT = 40, 6, 2


class Reach:
    """Force in [-1, 1]^2, velocity with drag, wind that depends on the place; reward is minus the distance."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng

    def reset(self):
        self.p = self.rng.uniform(-1, 1, (self.n, 2))
        self.v = np.zeros((self.n, 2))
        self.g = self.rng.uniform(-1, 1, (self.n, 2))
        return self.obs()

    def obs(self):
        return np.concatenate([self.p, self.v, self.g - self.p], 1).astype(np.float32)

    def step(self, a):
        wind = 0.3 * np.stack([np.sin(3 * self.p[:, 1]), np.cos(3 * self.p[:, 0])], 1)
        self.v = 0.85 * self.v + 0.12 * (np.clip(a, -1, 1) + wind)
        self.p = np.clip(self.p + 0.5 * self.v, -2, 2)
        d = np.linalg.norm(self.p - self.g, axis=1)
        return self.obs(), (-d - 0.02 * (a ** 2).sum(1)).astype(np.float32)


def mlp(cin, cout, hid=96):
    return nn.Sequential(nn.Linear(cin, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, cout))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS, ACT)

    def forward(self, s):
        return torch.tanh(self.net(s))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = mlp(OBS + ACT, 1), mlp(OBS + ACT, 1)

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        return self.q1(x), self.q2(x)


@torch.no_grad()
def evaluate(actor, n=100):
    env = Reach(n, np.random.default_rng(77))
    s, total = env.reset(), np.zeros(n)
    for _ in range(T):
        s, r = env.step(actor(torch.from_numpy(s)).numpy())
        total += r
    return total.mean()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env = Reach(16, rng)
    actor, critic = Actor(), Critic()
    actor_t, critic_t = copy.deepcopy(actor), copy.deepcopy(critic)
    opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    if CASE == "c2":
        opt_c = torch.optim.Adam(actor.parameters(), lr=2e-3)
    else:
        opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3)
    size = 20000
    S, A, R, S2 = (np.zeros((size, k), np.float32) for k in (OBS, ACT, 1, OBS))
    n, gamma, tau, updates, warm = 0, 0.95, 0.02, 900, 80
    scores = []
    s = env.reset()
    for step in range(updates + warm):
        with torch.no_grad():
            a = actor(torch.from_numpy(s)).numpy()
        if step < warm:
            a = rng.uniform(-1, 1, a.shape)
        a = np.clip(a + 0.2 * rng.normal(size=a.shape), -1, 1).astype(np.float32)
        s2, r = env.step(a)
        i = np.arange(n, n + env.n) % size
        S[i], A[i], R[i, 0], S2[i] = s, a, r, s2
        n += env.n
        s = env.reset() if step % T == T - 1 else s2
        if step < warm:
            continue
        j = rng.integers(0, min(n, size), 128)
        bs, ba, br, bs2 = (torch.from_numpy(v[j]) for v in (S, A, R, S2))
        if CASE == "c1":
            br = br.squeeze(1)
        with torch.no_grad():
            a2 = actor_t(bs2)
            if CASE == "variant_x":
                a2 = (a2 + (0.2 * torch.randn_like(a2)).clamp(-0.4, 0.4)).clamp(-1, 1)
            q1, q2 = critic_t(bs, a2) if CASE == "c3" else critic_t(bs2, a2)
            y = br + gamma * torch.min(q1, q2)
        p1, p2 = critic(bs, ba)
        crit = F.smooth_l1_loss if CASE == "variant_x" else F.mse_loss
        loss_c = crit(p1, y) + crit(p2, y)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        if CASE != "variant_x" or step % 2 == 0:
            loss_a = -critic(bs, actor(bs))[0].mean()
            opt_a.zero_grad()
            loss_a.backward()
            opt_a.step()
        with torch.no_grad():
            for m, mt in ((actor, actor_t), (critic, critic_t)):
                for p, t in zip(m.parameters(), mt.parameters()):
                    if CASE == "c4":
                        t = (1 - tau) * t + tau * p
                    else:
                        t.copy_((1 - tau) * t + tau * p)
        k = step - warm + 1
        if k % 150 == 0:
            scores.append(evaluate(actor))
            print(f"update {k} critic loss {loss_c.item():.4f} q {p1.mean().item():.3f} return {scores[-1]:.2f}")
    print(f"FINAL quality (mean return, last three evaluations, higher is better) {np.mean(scores[-3:]):.3f}")


if __name__ == "__main__":
    main()
