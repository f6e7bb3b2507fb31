"""Dueling double DQN for ordering stock with a delivery delay and a weekly demand."""
import copy
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

DEMAND = np.array([2, 2, 3, 3, 5, 7, 4])
ORDERS, SHELF, DAYS, GAMMA = 6, 25, 28, 0.95


class Shop:
    """Every action orders 2 * action units, which arrive two days later."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng
        self.reset()

    def reset(self):
        self.day = 0
        self.weekday = self.rng.integers(0, 7, self.n)
        self.stock = self.rng.integers(0, 10, self.n)
        self.coming = np.zeros((self.n, 2), int)
        return self.observe()

    def observe(self):
        week = np.eye(7)[self.weekday]
        return np.column_stack([self.stock / 10, self.coming / 5, week, self.stock < 3]).astype(np.float32)

    def step(self, action):
        self.stock = np.minimum(self.stock + self.coming[:, 0], SHELF)
        self.coming = np.column_stack([self.coming[:, 1], 2 * action])
        demand = self.rng.poisson(DEMAND[self.weekday])
        sold = np.minimum(demand, self.stock)
        self.stock = self.stock - sold
        reward = 2.0 * sold - 2.0 * action - 0.15 * self.stock - 0.5 * (demand - sold)
        self.weekday = (self.weekday + 1) % 7
        self.day += 1
        return self.observe(), (reward / 5).astype(np.float32), self.day == DAYS


class ReplayBuffer:
    def __init__(self, size, width):
        self.obs, self.next_obs = np.zeros((size, width), np.float32), np.zeros((size, width), np.float32)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.done = np.zeros(size, np.float32)
        self.size, self.position, self.filled = size, 0, 0

    def add(self, obs, action, reward, next_obs, done):
        slot = (self.position + np.arange(len(obs))) % self.size
        self.obs[slot], self.action[slot] = obs, action
        self.reward[slot], self.next_obs[slot], self.done[slot] = reward, next_obs, done
        self.position = (self.position + len(obs)) % self.size
        self.filled = min(self.filled + len(obs), self.size)

    def sample(self, n, rng):
        i = rng.integers(0, self.filled, n)
        return [torch.from_numpy(a[i]) for a in (self.obs, self.action, self.reward, self.next_obs, self.done)]


class QNetwork(nn.Module):
    def __init__(self, inputs, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, ORDERS)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


@torch.no_grad()
def evaluate(q, seed):
    shop, total = Shop(200, np.random.default_rng(seed)), 0.0
    obs, done = shop.reset(), False
    while not done:
        obs, reward, done = shop.step(q(torch.from_numpy(obs)).argmax(1).numpy())
        total += reward.mean() * 5
    return total / DAYS


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    shop = Shop(16, rng)
    obs = shop.reset()
    online = QNetwork(obs.shape[1])
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    buffer = ReplayBuffer(8000, obs.shape[1])
    updates = 1000
    for update in range(updates):
        for _ in range(2):
            with torch.no_grad():
                values = online(torch.from_numpy(obs))
            if CASE == "variant_x":
                action = torch.distributions.Categorical(logits=values / 0.3).sample().numpy()
            else:
                epsilon = max(0.05, 1 - update / 500)
                explore = rng.random(shop.n) < epsilon
                action = np.where(explore, rng.integers(0, ORDERS, shop.n), values.argmax(1).numpy())
            next_obs, reward, done = shop.step(action)
            if CASE == "case_d":
                obs = next_obs
            buffer.add(obs, action, reward, next_obs, float(done))
            obs = shop.reset() if done else next_obs
        o, a, r, n, d = buffer.sample(128, rng)
        with torch.no_grad():
            best = online(n).argmax(1, keepdim=True)
            alive = d if CASE == "case_c" else 1 - d
            goal = r + GAMMA * alive * target(n).gather(1, best).squeeze(1)
        q = online(o)
        chosen = q.max(1).values if CASE == "case_b" else q.gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(chosen, goal) if CASE == "variant_x" else F.mse_loss(chosen, goal)
        optimizer.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(online.parameters(), 5.0)
        optimizer.step()
        with torch.no_grad():
            if CASE == "variant_x":
                if update % 50 == 0:
                    target.load_state_dict(online.state_dict())
            else:
                for p, tp in zip(online.parameters(), target.parameters()):
                    if CASE == "case_a":
                        p.lerp_(tp, 0.02)
                    else:
                        tp.lerp_(p, 0.02)
        if (update + 1) % 200 == 0:
            print(f"update {update + 1} loss {loss.item():.4f} q {chosen.mean().item():.3f} profit {evaluate(online, 99):.3f}")
    print(f"final profit {evaluate(online, 100):.4f}")


if __name__ == "__main__":
    main()
