"""Double DQN with a target network on a pole-balancing task (own vectorized simulator)."""
import copy
import os
import random
import sys
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
GAMMA, LIMIT = 0.97, 200


class Poles:
    """n independent poles on carts; an episode ends on a fall, or is cut after LIMIT steps."""

    def __init__(self, n, seed):
        self.rng = np.random.default_rng(seed)
        self.n = n
        self.state = self.rng.uniform(-0.05, 0.05, (n, 4)).astype(np.float32)
        self.age = np.zeros(n, int)

    def step(self, action):
        s = self.state
        force = np.where(action == 1, 10.0, -10.0)
        sin, cos = np.sin(s[:, 2]), np.cos(s[:, 2])
        tmp = (force + 0.05 * s[:, 3] ** 2 * sin) / 1.1
        ang = (9.8 * sin - cos * tmp) / (0.5 * (4 / 3 - 0.1 * cos ** 2 / 1.1))
        acc = tmp - 0.05 * ang * cos / 1.1
        s += 0.03 * np.stack([s[:, 1], acc, s[:, 3], ang], 1)
        self.age += 1
        fallen = (np.abs(s[:, 0]) > 2.4) | (np.abs(s[:, 2]) > 0.21)
        return s, np.ones(self.n, np.float32), fallen, self.age >= LIMIT

    def reset_where(self, over):
        self.state[over] = self.rng.uniform(-0.05, 0.05, (int(over.sum()), 4))
        self.age[over] = 0
        return self.state


class QNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.adv = nn.Linear(width, 2)
        self.val = nn.Linear(width, 1) if CASE == "variant_x" else None

    def forward(self, obs):
        h = self.body(obs * torch.tensor([0.5, 0.7, 5.0, 0.7]))
        a = self.adv(h)
        if self.val is not None:
            return self.val(h) + a - a.mean(-1, keepdim=True)
        return a


@torch.no_grad()
def evaluate(net, seed):
    net.eval()
    env = Poles(20, seed)
    alive, length = np.ones(20, bool), np.zeros(20)
    for _ in range(LIMIT):
        act = net(torch.from_numpy(env.state)).argmax(1).numpy()
        _, _, fallen, _ = env.step(act)
        length += alive
        alive &= ~fallen
        if not alive.any():
            break
    net.train()
    return length.mean()


def main():
    torch.manual_seed(SEED)
    random.seed(SEED)
    rng = np.random.default_rng(SEED)
    env = Poles(16, SEED)
    online = QNet()
    target = copy.deepcopy(online)
    target.requires_grad_(False)
    if CASE == "variant_x":
        opt = torch.optim.Adam(online.parameters(), lr=2e-3)
        sched = torch.optim.lr_scheduler.ConstantLR(opt, factor=1.0)
    else:
        opt = torch.optim.Adam(online.parameters(), lr=3e-3)
        sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, total_iters=1000)
    memory = deque(maxlen=1000)                                # each item holds one step of all poles
    keep = (lambda a: a) if CASE == "g4" else np.copy
    obs = env.state
    updates, total = 0, 1000
    while updates < total:
        eps = max(0.05, 1 - updates / 400)
        with torch.no_grad():
            act = online(torch.from_numpy(obs)).argmax(1).numpy()
        act = np.where(rng.random(16) < eps, rng.integers(0, 2, 16), act)
        before = keep(obs)
        nxt, rew, fallen, cut = env.step(act)
        memory.append((before, act, rew, keep(nxt), fallen))
        obs = env.reset_where(fallen | cut)
        if len(memory) < 40:
            continue
        batch = random.sample(memory, 12)
        s, a, r, s2, done = (torch.from_numpy(np.concatenate(z)) for z in zip(*batch))
        with torch.no_grad():
            pick = online(s2).argmax(1, keepdim=True)
            future = target(s if CASE == "g2" else s2).gather(1, pick).squeeze(1)
            if CASE == "g1":
                goal = r + GAMMA * future
            else:
                goal = r + GAMMA * future * (1 - done.float())
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.huber_loss(q, goal, delta=2.0) if CASE == "variant_x" else F.mse_loss(q, goal)
        opt.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        opt.step()
        sched.step()
        updates += 1
        if CASE == "variant_x":
            for p, t in zip(online.parameters(), target.parameters()):
                t.lerp_(p, 0.02)
        elif updates % 50 == 0:
            if CASE == "g3":
                online.load_state_dict(target.state_dict())
            else:
                target.load_state_dict(online.state_dict())
        if updates % 250 == 0:
            print("update %d  loss %.3f  q %.2f  greedy length %.1f"
                  % (updates, loss.item(), q.mean().item(), evaluate(online, 500)))
    print("final greedy episode length %.2f" % evaluate(online, 900))


if __name__ == "__main__":
    main()
