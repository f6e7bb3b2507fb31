"""PPO on a vectorised grid with walls of fire: walk to the goal with few steps, do not step into the fire."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
SIZE, GAMMA, LAMBDA, LIMIT = 7, 0.97, 0.95, 40
OBS = SIZE * SIZE + 4
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])
FIRE = {(3, 1), (3, 2), (3, 3), (3, 5), (5, 4)}


class Grid:
    def __init__(self, n, seed):
        self.n, self.rng = n, np.random.default_rng(seed)
        self.pos, self.goal, self.age = np.zeros((n, 2), int), np.zeros((n, 2), int), np.zeros(n, int)
        self.fire = np.zeros((SIZE, SIZE), bool)
        for c in FIRE:
            self.fire[c] = True
        self.restart(np.ones(n, bool))

    def restart(self, which):
        free = np.argwhere(~self.fire)
        for i in np.nonzero(which)[0]:
            a, b = self.rng.choice(len(free), 2, replace=False)
            self.pos[i], self.goal[i], self.age[i] = free[a], free[b], 0

    def observe(self):
        obs = np.zeros((self.n, OBS), np.float32)
        obs[np.arange(self.n), self.pos[:, 0] * SIZE + self.pos[:, 1]] = 1
        obs[:, -4:-2] = np.sign(self.goal - self.pos)
        obs[:, -2:] = (self.goal - self.pos) / SIZE
        return torch.from_numpy(obs)

    def step(self, action):
        self.pos = np.clip(self.pos + MOVES[action], 0, SIZE - 1)
        self.age += 1
        won = (self.pos == self.goal).all(1)
        burnt = self.fire[self.pos[:, 0], self.pos[:, 1]]
        reward = -0.02 + 1.0 * won - 0.7 * burnt
        done = won | burnt | (self.age >= LIMIT)
        self.restart(done)
        return torch.from_numpy(reward.astype(np.float32)), torch.from_numpy(done.astype(np.float32)), won


class Agent(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi, self.v = nn.Linear(hidden, 4), nn.Linear(hidden, 1)
        if CASE == "variant_x":
            nn.init.orthogonal_(self.pi.weight, 0.1)
            nn.init.zeros_(self.pi.bias)

    def forward(self, obs):
        h = self.body(obs)
        scores = self.pi(h)
        if CASE == "b1":
            scores = torch.softmax(scores, -1)
        return Categorical(logits=scores), self.v(h).squeeze(-1)


def gae(rewards, values, dones, last):
    n = len(rewards)
    adv = torch.zeros_like(rewards)
    running = torch.zeros_like(last)
    for t in (range(n) if CASE == "b2" else reversed(range(n))):
        nxt = last if t == n - 1 else values[t + 1]
        delta = rewards[t] + GAMMA * nxt * (1 - dones[t]) - values[t]
        running = delta + GAMMA * LAMBDA * (1 - dones[t]) * running
        adv[t] = running
    return adv


@torch.no_grad()
def play(agent, seed, n=64):
    env = Grid(n, seed)
    total, finished = np.zeros(n), np.zeros(n, bool)
    for _ in range(LIMIT):
        dist, _ = agent(env.observe())
        reward, done, _ = env.step(dist.sample().numpy())
        total += reward.numpy() * ~finished
        finished |= done.numpy() > 0
    return total.mean()


def main():
    torch.manual_seed(SEED)
    env, agent = Grid(32, SEED + 1), Agent()
    iters, horizon, epochs, parts = 60, 40, 3, 4
    lr = 4e-3
    opt = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
    for it in range(iters):
        if CASE == "variant_x":
            for group in opt.param_groups:
                group["lr"] = lr * (1 - 0.3 * it / iters)
        store = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
        with torch.no_grad():
            for _ in range(horizon):
                obs = env.observe()
                dist, val = agent(obs)
                act = dist.sample()
                rew, done, _ = env.step(act.numpy())
                for k, v in zip(store, (obs, act, dist.log_prob(act), val, rew, done)):
                    store[k].append(v)
            last = agent(env.observe())[1]
            d = {k: torch.stack(v) for k, v in store.items()}
            adv = gae(d["rew"], d["val"], d["done"], last)
            ret = adv + d["val"]
        flat = {k: v.flatten(0, 1) for k, v in d.items()}
        adv, ret = adv.flatten(), ret.flatten()
        for _ in range(epochs):
            for idx in torch.randperm(len(adv)).chunk(parts):
                dist, val = agent(flat["obs"][idx])
                act = dist.sample() if CASE == "b3" else flat["act"][idx]
                ratio = (dist.log_prob(act) - flat["logp"][idx]).exp()
                a = adv[idx]
                a = (a - a.mean()) / (a.std() + 1e-8)
                if CASE == "b4":
                    policy = torch.min(-ratio * a, -ratio.clamp(0.8, 1.2) * a).mean()
                else:
                    policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
                value = 0.5 * (val - ret[idx]).pow(2).mean()
                loss = policy + 0.5 * value - 0.01 * dist.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
                opt.step()
        if (it + 1) % 15 == 0:
            print(f"iter {it + 1} policy {policy.item():.4f} value {value.item():.4f} entropy {dist.entropy().mean().item():.3f} return {play(agent, 7):.3f}")
    print(f"quality {np.mean([play(agent, 500 + k) for k in range(4)]):.4f}")


if __name__ == "__main__":
    main()
