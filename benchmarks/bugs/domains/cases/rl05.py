"""Dueling DQN with Polyak averaging on a corridor with large rewards: the TD loss rises while values grow."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

LEN = 8


class Dueling(nn.Module):
    def __init__(self, hid=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(LEN + 1, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.value = nn.Linear(hid, 1)
        self.adv = nn.Linear(hid, 2)

    def forward(self, x):
        h = self.trunk(x)
        a = self.adv(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


def encode(pos, key):
    return torch.cat([F.one_hot(pos, LEN).float(), key.float().unsqueeze(-1)], -1)


class Corridor:
    """Fetch the key at the left end, then bring it to the right end (+50)."""

    def __init__(self, n, g):
        self.n, self.g = n, g
        self.pos, self.key, self.t = self.fresh(n)

    def fresh(self, k):
        return (torch.randint(1, LEN - 1, (k,), generator=self.g), torch.rand(k, generator=self.g) < 0.5,
                torch.zeros(k, dtype=torch.long))

    def step(self, a):
        self.pos = (self.pos + 2 * a - 1).clamp(0, LEN - 1)
        self.t = self.t + 1
        self.key = self.key | (self.pos == 0)
        win = (self.pos == LEN - 1) & self.key
        r = torch.where(win, 50.0, -0.5)
        nxt = encode(self.pos, self.key)
        end = win | (self.t > 30)
        if end.any():
            p, k, t = self.fresh(int(end.sum()))
            self.pos[end], self.key[end], self.t[end] = p, k, t
        return nxt, r, win.float()


def main():
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(7)
    q = Dueling()
    tq = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.AdamW(q.parameters(), lr=3e-3, weight_decay=1e-5)
    env = Corridor(48, g)
    mem = []
    s = encode(env.pos, env.key)
    for step in range(320):
        eps = max(0.08, 1 - step / 260)
        with torch.no_grad():
            a = q(s).argmax(-1)
        a = torch.where(torch.rand(env.n, generator=g) < eps, torch.randint(2, (env.n,), generator=g), a)
        s2, r, d = env.step(a)
        mem.append((s, a, r, s2, d))
        mem = mem[-150:]
        s = encode(env.pos, env.key)
        if step < 20:
            continue
        cols = [torch.cat(c) for c in zip(*mem)]
        idx = torch.randint(len(cols[0]), (256,), generator=g)
        bs, ba, br, bs2, bd = (c[idx] for c in cols)
        with torch.no_grad():
            best = q(bs2).argmax(-1, keepdim=True)
            y = br + 0.97 * (1 - bd) * tq(bs2).gather(1, best).squeeze(1)
        loss = F.huber_loss(q(bs).gather(1, ba[:, None]).squeeze(1), y, delta=10.0)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        opt.step()
        with torch.no_grad():
            for p, t in zip(q.parameters(), tq.parameters()):
                t.lerp_(p, 0.08)
        if step % 60 == 0:
            print(step, round(loss.item(), 3), round(y.mean().item(), 2))
    env = Corridor(200, g)
    won = torch.zeros(200)
    for _ in range(25):
        with torch.no_grad():
            a = q(encode(env.pos, env.key)).argmax(-1)
        _, _, d = env.step(a)
        won = torch.maximum(won, d)
    return won.mean().item()


if __name__ == "__main__":
    print(main())
