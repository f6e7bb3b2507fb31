"""Deep Q-learning on a vectorised cart-pole written in numpy."""
import copy
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

LIMIT = 200


class CartPole:
    """n poles in parallel; an episode ends when the pole falls or after LIMIT steps."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng
        self.state = rng.uniform(-0.05, 0.05, (n, 4)).astype(np.float32)
        self.t = np.zeros(n, dtype=int)

    def obs(self):
        return self.state if CASE == "c3" else self.state.copy()

    def step(self, action):
        s = self.state
        x, xd, th, thd = s[:, 0].copy(), s[:, 1].copy(), s[:, 2].copy(), s[:, 3].copy()
        force = np.where(action == 1, 10.0, -10.0)
        c, sn = np.cos(th), np.sin(th)
        tmp = (force + 0.05 * thd ** 2 * sn) / 1.1
        tha = (9.8 * sn - c * tmp) / (0.5 * (4 / 3 - 0.1 * c ** 2 / 1.1))
        xa = tmp - 0.05 * tha * c / 1.1
        s[:, 0], s[:, 1] = x + 0.02 * xd, xd + 0.02 * xa
        s[:, 2], s[:, 3] = th + 0.02 * thd, thd + 0.02 * tha
        self.t += 1
        fell = (np.abs(s[:, 0]) > 2.4) | (np.abs(s[:, 2]) > 0.2095)
        over = fell | (self.t >= LIMIT)
        return self.obs(), np.ones(self.n, dtype=np.float32), fell, over

    def restart(self, which):
        self.state[which] = self.rng.uniform(-0.05, 0.05, (int(which.sum()), 4))
        self.t[which] = 0


class QNet(nn.Module):
    def __init__(self, hid=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.head = nn.Linear(hid, 2)
        self.register_buffer("scale", torch.tensor([1.0, 1.0, 5.0, 1.0]))

    def forward(self, s):
        return self.head(self.body(s * self.scale))


class Replay:
    def __init__(self, size):
        self.size, self.n, self.at = size, 0, 0
        self.s, self.s2 = np.zeros((size, 4), np.float32), np.zeros((size, 4), np.float32)
        self.a, self.r, self.d = np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, np.float32)

    def add(self, s, a, r, s2, d):
        i = (self.at + np.arange(len(a))) % self.size
        self.s[i], self.a[i], self.r[i], self.s2[i], self.d[i] = s, a, r, s2, d
        self.at, self.n = (self.at + len(a)) % self.size, min(self.size, self.n + len(a))

    def sample(self, k, rng):
        i = rng.integers(0, self.n, k)
        return (torch.from_numpy(v[i]) for v in (self.s, self.a, self.r, self.s2, self.d))


@torch.no_grad()
def evaluate(q, seed, n=20):
    env = CartPole(n, np.random.default_rng(seed))
    alive, total = np.ones(n, bool), np.zeros(n)
    for _ in range(LIMIT):
        a = q(torch.from_numpy(env.obs())).argmax(1).numpy()
        total += alive
        _, _, fell, _ = env.step(a)
        alive &= ~fell
    return total.mean()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env, buf = CartPole(16, rng), Replay(20000)
    q = QNet()
    target = copy.deepcopy(q)
    opt = torch.optim.Adam(q.parameters(), lr=1e-3)
    gamma, steps, warm = 0.98, 1000, 60
    s = env.obs()
    scores = []
    for step in range(steps + warm):
        eps = max(0.05, 1.0 - step / 300)
        with torch.no_grad():
            a = q(torch.from_numpy(s)).argmax(1).numpy()
        a = np.where(rng.uniform(size=env.n) < eps, rng.integers(0, 2, env.n), a)
        s2, r, fell, over = env.step(a)
        buf.add(s, a, r, s2, fell)
        if over.any():
            env.restart(over)
        s = env.obs()
        if step < warm:
            continue
        for g in opt.param_groups:
            g["lr"] = 1e-3 * (1 - 0.9 * (step - warm) / steps)
        bs, ba, br, bs2, bd = buf.sample(128, rng)
        with torch.no_grad():
            if CASE == "c2":
                nxt = target(bs2).max(1)[1]
            elif CASE == "variant_x":
                nxt = target(bs2).gather(1, q(bs2).argmax(1, keepdim=True)).squeeze(1)
            else:
                nxt = target(bs2).max(1)[0]
            if CASE == "c1":
                y = br + gamma * nxt
            else:
                y = br + gamma * nxt * (1 - bd)
        pred = q(bs).gather(1, ba[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(pred, y) if CASE == "variant_x" else F.mse_loss(pred, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        opt.step()
        if CASE == "variant_x":
            with torch.no_grad():
                for p, t in zip(q.parameters(), target.parameters()):
                    t.lerp_(p, 0.02)
        elif step % 30 == 0 and CASE != "c4":
            target.load_state_dict(q.state_dict())
        k = step - warm + 1
        if k % 250 == 0 or k in (850, 900, 950):
            scores.append(evaluate(q, 1000 + k))
            print(f"update {k} loss {loss.item():.4f} mean q {pred.mean().item():.2f} return {scores[-1]:.1f}")
    print(f"FINAL quality (mean return of the last four evaluations, at most {LIMIT}) {np.mean(scores[-4:]):.2f}")


if __name__ == "__main__":
    main()
