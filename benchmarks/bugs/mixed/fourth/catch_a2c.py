"""Advantage actor-critic on a vectorised Catch game with drifting balls."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

ROWS, COLS = 8, 7
GAMMA, LAMBDA = 0.97, 0.95


class Catch:
    """A ball falls with sideways drift (it bounces off the walls); the paddle moves left, stays or moves right."""

    def __init__(self, n, rng):
        self.n, self.rng = n, rng
        self.row, self.ball, self.drift, self.paddle = (np.zeros(n, int) for _ in range(4))
        self.observation = np.zeros((n, ROWS + 2 * COLS + 3), np.float32)
        self.restart(np.ones(n, bool))
        self.draw()

    def restart(self, which):
        k = which.sum()
        self.row[which] = 0
        self.ball[which] = self.rng.integers(0, COLS, k)
        self.drift[which] = self.rng.integers(-1, 2, k)
        self.paddle[which] = self.rng.integers(0, COLS, k)

    def draw(self):
        i = np.arange(self.n)
        self.observation[:] = 0
        self.observation[i, self.row] = 1
        self.observation[i, ROWS + self.ball] = 1
        self.observation[i, ROWS + COLS + self.paddle] = 1
        self.observation[i, ROWS + 2 * COLS + 1 + self.drift] = 1

    def step(self, action):
        self.paddle = np.clip(self.paddle + action - 1, 0, COLS - 1)
        moved = self.ball + self.drift
        self.drift = np.where((moved < 0) | (moved >= COLS), -self.drift, self.drift)
        self.ball = np.clip(self.ball + self.drift, 0, COLS - 1)
        self.row += 1
        done = self.row == ROWS - 1
        reward = np.where(done, np.where(self.ball == self.paddle, 1.0, -1.0), 0.0)
        self.restart(done)
        self.draw()
        return self.observation, reward.astype(np.float32), done


class ActorCritic(nn.Module):
    def __init__(self, inputs, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy, self.value = nn.Linear(hidden, 3), nn.Linear(hidden, 1)
        if CASE == "variant_x":
            for layer in (self.trunk[0], self.trunk[2]):
                nn.init.orthogonal_(layer.weight, 2 ** 0.5)
            nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, x):
        h = self.trunk(x)
        scores = self.policy(h)
        if CASE == "case_c":
            scores = scores.softmax(-1)
        return Categorical(logits=scores), self.value(h).squeeze(-1)


@torch.no_grad()
def evaluate(model, rng):
    env = Catch(200, rng)
    for _ in range(ROWS - 1):
        _, reward, _ = env.step(model(torch.from_numpy(env.observation))[0].sample().numpy())
    return float(reward.mean())


def targets(rewards, dones, values, last):
    """Returns for every step of the rollout, bootstrapped with the last value."""
    result, running, advantage = torch.zeros_like(rewards), last, torch.zeros_like(last)
    following = last
    for t in reversed(range(len(rewards))):
        alive = 1 - dones[t]
        running = rewards[t] + GAMMA * alive * running
        delta = rewards[t] + GAMMA * alive * following - values[t]
        advantage = delta + GAMMA * LAMBDA * alive * advantage
        following = values[t]
        result[t] = values[t] + advantage if CASE == "variant_x" else running
    return result


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    env, horizon = Catch(32, rng), 10
    model = ActorCritic(env.observation.shape[1])
    updates = 600 if CASE == "variant_x" else 400
    if CASE == "variant_x":
        optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.99, eps=1e-5)
        scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, updates)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        scheduler = None
    observation = env.observation
    for update in range(updates):
        seen, actions, rewards, dones = [], [], [], []
        for _ in range(horizon):
            seen.append(observation if CASE == "case_b" else observation.copy())
            with torch.no_grad():
                action = model(torch.from_numpy(observation))[0].sample()
            observation, reward, done = env.step(action.numpy())
            actions.append(action)
            rewards.append(reward)
            dones.append(done)
        seen, actions = torch.from_numpy(np.stack(seen)), torch.stack(actions)
        rewards, dones = torch.from_numpy(np.stack(rewards)), torch.from_numpy(np.stack(dones)).float()
        dist, values = model(seen)
        with torch.no_grad():
            last = model(torch.from_numpy(observation))[1]
            returns = targets(rewards, dones, values, last)
        advantage = (values - returns if CASE == "case_d" else returns - values).detach()
        if CASE == "variant_x":
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        log_prob = dist.log_prob(dist.sample() if CASE == "case_a" else actions)
        policy_loss = -(log_prob * advantage).mean()
        value_loss = (returns - values).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if (update + 1) % 80 == 0:
            print(f"update {update + 1} policy {policy_loss.item():.4f} value {value_loss.item():.4f} "
                  f"entropy {dist.entropy().mean().item():.3f} return {evaluate(model, rng):.3f}")
    print(f"final return {np.mean([evaluate(model, rng) for _ in range(3)]):.4f}")


if __name__ == "__main__":
    main()
