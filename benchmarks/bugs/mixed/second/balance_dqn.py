"""DQN with replay and a target network on a cart that is pushed around and must stay inside a track."""
import copy
import os
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
GAMMA, LIMIT = 0.95, 150


class Track:
    """Vector of carts on an unstable track; reward 1 for each step inside, an episode ends outside."""

    def __init__(self, n, seed):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.state = np.zeros((n, 2), dtype=np.float32)
        self.age = np.zeros(n, dtype=int)
        self.restart(np.ones(n, dtype=bool))

    def restart(self, which):
        k = int(which.sum())
        self.state[which] = self.rng.uniform(-0.3, 0.3, (k, 2))
        self.age[which] = 0

    def observe(self):
        return self.state if CASE == "b4" else self.state.copy()

    def step(self, action):
        push = (action - 1) * 0.10
        self.state[:, 1] += 0.06 * self.state[:, 0] + push + self.rng.normal(0, 0.03, self.n)
        self.state[:, 0] += 0.3 * self.state[:, 1]
        self.age += 1
        out = np.abs(self.state[:, 0]) > 1.0
        return self.observe(), np.ones(self.n, dtype=np.float32), out, self.age >= LIMIT


class QNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value = nn.Linear(hidden, 1)
        self.adv = nn.Linear(hidden, 3)

    def forward(self, s):
        h = self.body(s)
        if CASE == "variant_x":
            a = self.adv(h)
            return self.value(h) + a - a.mean(1, keepdim=True)
        return self.adv(h)


class Replay:
    def __init__(self, size):
        self.size, self.n, self.at = size, 0, 0
        self.s, self.s2 = np.zeros((size, 2), np.float32), np.zeros((size, 2), np.float32)
        self.a, self.r, self.d = np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, np.float32)

    def add(self, s, a, r, s2, d):
        for i in range(len(a)):
            k = self.at
            self.s[k], self.a[k], self.r[k], self.s2[k], self.d[k] = s[i], a[i], r[i], s2[i], d[i]
            self.at, self.n = (k + 1) % self.size, min(self.n + 1, self.size)

    def sample(self, batch, rng):
        idx = rng.integers(0, self.n, batch)
        return [torch.from_numpy(v[idx]) for v in (self.s, self.a, self.r, self.s2, self.d)]


@torch.no_grad()
def play(model, seed, n=40):
    env = Track(n, seed)
    alive, length = np.ones(n, dtype=bool), np.zeros(n)
    for _ in range(LIMIT):
        _, _, out, _ = env.step(model(torch.from_numpy(env.observe())).argmax(1).numpy())
        length += alive
        alive &= ~out
    return length.mean()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env, replay = Track(8, SEED + 1), Replay(20000)
    online = QNet()
    target = copy.deepcopy(online).requires_grad_(False)
    opt = torch.optim.Adam(online.parameters(), lr=1e-3)
    steps = 1000
    s = env.observe()
    for step in range(steps):
        eps = max(0.1, 1.0 - step / 500)
        with torch.no_grad():
            greedy = online(torch.from_numpy(s)).argmax(1).numpy()
        a = np.where(rng.random(env.n) < eps, rng.integers(0, 3, env.n), greedy)
        s2, r, out, late = env.step(a)
        replay.add(s, a, r, s2, out.astype(np.float32))
        env.restart(out | late)
        s = env.observe()
        if replay.n < 256:
            continue
        bs, ba, br, bs2, bd = replay.sample(128, rng)
        with torch.no_grad():
            if CASE == "variant_x":
                pick = online(bs2).argmax(1, keepdim=True)
                nxt = target(bs2).gather(1, pick).squeeze(1)
            elif CASE == "b3":
                nxt = target(bs2).max(1, keepdim=True)[0]
                bd = bd[:, None]
            else:
                nxt = target(bs2).max(1)[0]
            goal = br + GAMMA * nxt if CASE == "b1" else br + GAMMA * (1 - bd) * nxt
        q = online(bs).gather(1, ba[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, goal)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        opt.step()
        if CASE == "variant_x":
            with torch.no_grad():
                for t, p in zip(target.parameters(), online.parameters()):
                    t.lerp_(p, 0.03)
        elif step % 40 == 0:
            if CASE == "b2":
                online.load_state_dict(target.state_dict())
            else:
                target.load_state_dict(online.state_dict())
        if (step + 1) % 200 == 0:
            print(f"step {step + 1} eps {eps:.2f} loss {loss.item():.4f} q {q.mean().item():.2f} length {play(online, 99):.1f}")
    print(f"quality {np.mean([play(online, 1000 + k) for k in range(3)]):.2f}")


if __name__ == "__main__":
    main()
