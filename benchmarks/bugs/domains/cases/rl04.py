"""Double DQN in a windy grid world."""
import copy
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE = 5
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grid:
    def __init__(self, n, seed, limit=25):
        self.n, self.limit = n, limit
        self.rng = np.random.RandomState(seed)
        self.pos = np.zeros((n, 2), int)
        self.t = np.zeros(n, int)
        self.reset(np.ones(n, bool))

    def reset(self, m):
        self.pos[m] = self.rng.randint(0, SIZE - 1, (m.sum(), 2))
        self.t[m] = 0

    def obs(self):
        o = np.zeros((self.n, SIZE * SIZE), "float32")
        o[np.arange(self.n), self.pos[:, 0] * SIZE + self.pos[:, 1]] = 1
        return o

    def step(self, a):
        slip = self.rng.rand(self.n) < 0.05
        a = np.where(slip, self.rng.randint(0, 4, self.n), a)
        self.pos = np.clip(self.pos + MOVES[a], 0, SIZE - 1)
        self.t += 1
        goal = (self.pos == SIZE - 1).all(1)
        pit = (self.pos == np.array([2, 2])).all(1)
        r = np.where(goal, 1.0, np.where(pit, -1.0, 0.0)).astype("float32")
        term = goal | pit
        nxt = self.obs()
        self.reset(term | (self.t >= self.limit))
        return nxt, r, term.astype("float32")


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(SIZE * SIZE, 64)
        self.fc2 = nn.Linear(64, 64)
        self.q = nn.Linear(64, 4)

    def forward(self, x):
        return self.q(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Agent:
    def __init__(self, gamma=0.95, sync_every=20):
        self.online = QNet()
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.gamma, self.sync_every = gamma, sync_every
        self.opt = torch.optim.Adam(self.online.parameters(), lr=2e-3)
        self.updates = 0

    def act(self, obs, eps, rng):
        with torch.no_grad():
            a = self.online(torch.from_numpy(obs)).argmax(-1).numpy()
        return np.where(rng.rand(len(a)) < eps, rng.randint(0, 4, len(a)), a)

    def learn(self, s, a, r, s2, d):
        q = self.online(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online(s2).argmax(-1, keepdim=True)
            y = r + self.gamma * (1 - d) * self.target(s2).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        if self.updates % self.sync_every == 0:
            self.target.state_dict().update(self.online.state_dict())
        return loss.item()


def evaluate(agent, seed=50):
    env = Grid(100, seed)
    alive, total, disc = np.ones(100), np.zeros(100), 1.0
    for _ in range(25):
        _, r, d = env.step(agent.act(env.obs(), 0.0, np.random.RandomState(0)))
        total += alive * r * disc
        alive *= 1 - d
        disc *= 0.95
    return total.mean()


def main():
    torch.manual_seed(2)
    rng = np.random.RandomState(2)
    env, agent = Grid(32, 2), Agent()
    memory = deque(maxlen=6000)
    obs = env.obs()
    for step in range(330):
        eps = max(0.1, 1 - step / 150)
        act = agent.act(obs, eps, rng)
        nxt, r, d = env.step(act)
        memory.extend(zip(obs, act, r, nxt, d))
        obs = env.obs()
        if step >= 30:
            pick = rng.randint(0, len(memory), 128)
            s, a, rr, s2, dd = zip(*[memory[i] for i in pick])
            loss = agent.learn(torch.tensor(np.array(s)), torch.tensor(np.array(a)), torch.tensor(np.array(rr)),
                               torch.tensor(np.array(s2)), torch.tensor(np.array(dd)))
            if step % 60 == 0:
                print(f"step {step} td {loss:.4f}")
    return float(evaluate(agent))


if __name__ == "__main__":
    print(main())
