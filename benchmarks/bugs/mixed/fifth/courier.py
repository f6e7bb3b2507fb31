"""Courier on a small grid: fetch a parcel, then deliver it. Dueling double Q-learning with 3-step returns."""
import os, sys
from collections import deque
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
SIZE, LIMIT, NSTEP, GAMMA = 5, 40, 3, 0.9
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Courier:
    """Observation: own cell, way to the parcel, way to the door, carrying flag."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.view = np.zeros(7, dtype=np.float32)

    def observe(self):
        out = self.view
        if CASE != "same_buffer":
            out = np.zeros_like(self.view)
        out[:] = 0
        out[0:2] = self.me / SIZE
        out[2:4] = (self.parcel - self.me) / 2
        out[4:6] = (self.door - self.me) / 2
        out[6] = self.carry
        return out

    def reset(self):
        cells = self.rng.choice(SIZE * SIZE, 3, replace=False)
        self.me, self.parcel, self.door = (np.array([c // SIZE, c % SIZE]) for c in cells)
        self.carry, self.t = 0.0, 0
        return self.observe()

    def step(self, a):
        self.t += 1
        self.me = np.clip(self.me + MOVES[a], 0, SIZE - 1)
        reward, done = -0.02, False
        if not self.carry and (self.me == self.parcel).all():
            self.carry, reward = 1.0, 0.5
        if self.carry:
            self.parcel = self.me.copy()
            if (self.me == self.door).all():
                reward, done = 1.0, True
        return self.observe(), reward, done, self.t >= LIMIT


class DuelNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.adv = nn.Linear(width, 1), nn.Linear(width, 4)
        if CASE == "variant_x":
            self.body.append(nn.LayerNorm(width))

    def forward(self, s):
        h = self.body(s)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class Memory:
    def __init__(self, size):
        self.rows = deque(maxlen=size)

    def add(self, *row):
        self.rows.append(row)

    def sample(self, n, rng):
        picks = [self.rows[i] for i in rng.integers(0, len(self.rows), n)]
        s, a, r, s2, end, disc = zip(*picks)
        f = lambda v: torch.tensor(np.asarray(v), dtype=torch.float32)
        return f(s), torch.tensor(a), f(r), f(s2), f(end), f(disc)


def flush(pending, memory, s2, end):
    s, a, _ = pending[0]
    ret = sum(GAMMA ** i * r for i, (_, _, r) in enumerate(pending))
    memory.add(s, a, ret, s2, float(end), GAMMA ** len(pending))
    pending.popleft()


def delivered(net, episodes=100):
    env, good = Courier(999), 0
    for _ in range(episodes):
        s = env.reset()
        while True:
            with torch.no_grad():
                a = int(net(torch.from_numpy(s)[None]).argmax())
            s, _, done, late = env.step(a)
            if done or late:
                good += done
                break
    return good / episodes


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env, memory = Courier(1000 + SEED), Memory(12000)
    net, target = DuelNet(), DuelNet()
    target.load_state_dict(net.state_dict())
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    updates, total = 0, 9000
    s, pending = env.reset(), deque()
    for t in range(1, total + 1):
        eps = max(0.1, 1.0 - t / 4500)
        if rng.random() < eps:
            a = int(rng.integers(4))
        else:
            with torch.no_grad():
                a = int(net(torch.from_numpy(s)[None]).argmax())
        s2, r, done, late = env.step(a)
        pending.append((s, a, r))
        if len(pending) == NSTEP:
            flush(pending, memory, s2, done)
        if done or late:
            while pending:
                flush(pending, memory, s2, done)
            s2 = env.reset()
        s = s2
        if t >= 1000 and t % 8 == 0:
            st, ac, re, nx, end, disc = memory.sample(128, rng)
            q = net(st).gather(1, ac[:, None]).squeeze(1)
            with torch.no_grad():
                best = net(nx).argmax(1, keepdim=True)
                boot = target(nx).gather(1, best)
                boot = boot if CASE == "boot_col" else boot.squeeze(1)
                live = end if CASE == "end_mask" else 1 - end
                y = re + disc * live * boot
            loss = (q - y).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            if CASE == "variant_x":
                nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
            updates += 1
            if CASE == "variant_x":
                with torch.no_grad():
                    for p, q_ in zip(target.parameters(), net.parameters()):
                        p.lerp_(q_, 0.02)
            elif updates % 50 == 0:
                if CASE == "sync_back":
                    net.load_state_dict(target.state_dict())
                else:
                    target.load_state_dict(net.state_dict())
            if updates % 250 == 0:
                print(f"t {t} eps {eps:.2f} loss {loss.item():.4f} delivered {delivered(net, 40):.2f}")
    print("quality", round(delivered(net), 4))


if __name__ == "__main__":
    main()
