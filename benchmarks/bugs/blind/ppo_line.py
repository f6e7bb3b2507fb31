"""PPO on a small environment: walk along a line to a goal whose side is shown by two numbers."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "advantage_sign",
    "old_log_probs_recomputed",
    "returns_run_forward",
    "entropy_dominates",
    "variant_gae_two_optimizers",
)
ENVS, HORIZON, CELLS, LATEST = 16, 24, 9, 16
ROUNDS, EPOCHS, GAMMA = 60, 4, 0.93


class Line:
    """Walkers on a line with a goal; reaching it pays 1, a step costs 0.05."""

    def __init__(self, count: int = ENVS) -> None:
        self.place = torch.randint(0, CELLS, (count,))
        self.goal = torch.randint(0, CELLS, (count,))
        self.age = torch.zeros(count, dtype=torch.long)

    def look(self) -> Tensor:
        places, goals = (F.one_hot(x, CELLS).float() for x in (self.place, self.goal))
        return torch.cat([places, goals], 1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return rewards and whether the episode ended; ended episodes start anew."""
        self.place = (self.place + action - 1).clamp(0, CELLS - 1)
        self.age += 1
        reached = self.place == self.goal
        done = reached | (self.age >= LATEST)
        count = len(self.place)
        self.place = torch.where(done, torch.randint(0, CELLS, (count,)), self.place)
        self.goal = torch.where(done, torch.randint(0, CELLS, (count,)), self.goal)
        self.age = self.age.masked_fill(done, 0)
        return reached.float() - 0.05, done.float()


class Agent(nn.Module):
    """A body for the policy and one for the values."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.policy = nn.Sequential(
            nn.Linear(2 * CELLS, size),
            nn.Tanh(),
            nn.Linear(size, size),
            nn.Tanh(),
            nn.Linear(size, 3),
        )
        self.value = nn.Sequential(nn.Linear(2 * CELLS, size), nn.Tanh(), nn.Linear(size, 1))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(seen).log_softmax(-1), self.value(seen)


def returns_of(rewards: Tensor, dones: Tensor, last: Tensor, case: str) -> Tensor:
    """Discounted returns, from the last step to the first."""
    running, out = last, torch.zeros_like(rewards)
    order = range(HORIZON) if case == "returns_run_forward" else reversed(range(HORIZON))
    if case == "returns_run_forward":
        running = torch.zeros_like(last)
    for t in order:
        running = rewards[t] + GAMMA * running * (1 - dones[t])
        out[t] = running
    return out


def gae(rewards: Tensor, dones: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """Generalized advantage estimates with lambda 0.9."""
    following, running, out = last, torch.zeros_like(last), torch.zeros_like(rewards)
    for t in reversed(range(HORIZON)):
        delta = rewards[t] + GAMMA * following * (1 - dones[t]) - values[t]
        running = delta + GAMMA * 0.9 * (1 - dones[t]) * running
        out[t], following = running, values[t]
    return out


@torch.no_grad()
def reward_rate(agent: Agent) -> float:
    """The mean reward per step of the policy."""
    env, total = Line(128), 0.0
    for _ in range(60):
        action = torch.multinomial(agent(env.look())[0].exp(), 1)[:, 0]
        total += float(env.step(action)[0].mean())
    return total / 60


def main(case: str) -> None:
    torch.manual_seed(0)
    env, agent = Line(), Agent()
    special = case == "variant_gae_two_optimizers"
    optimizers = [torch.optim.Adam(agent.parameters(), lr=3e-3)]
    if special:
        optimizers = [
            torch.optim.Adam(agent.policy.parameters(), lr=3e-3),
            torch.optim.RMSprop(agent.value.parameters(), lr=2e-3),
        ]
    for turn in range(ROUNDS):
        rows = []
        with torch.no_grad():
            for _ in range(HORIZON):
                seen = env.look()
                logs, value = agent(seen)
                action = torch.multinomial(logs.exp(), 1)
                rows.append(
                    (
                        seen,
                        action,
                        logs.gather(1, action)[:, 0],
                        value[:, 0],
                        *env.step(action[:, 0]),
                    )
                )
            last = agent(env.look())[1][:, 0]
        seen, action, old, value, reward, done = (
            torch.stack(part) for part in zip(*rows, strict=True)
        )
        returns = returns_of(reward, done, last, case)
        advantage = gae(reward, done, value, last) if special else returns - value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        seen, action, old = seen.flatten(0, 1), action.flatten(0, 1), old.flatten()
        advantage, returns = advantage.flatten(), returns.flatten()
        bonus = 1.5 if case == "entropy_dominates" else 0.02 * (1 - turn / ROUNDS)
        for _ in range(EPOCHS):
            logs, value = agent(seen)
            chosen = logs.gather(1, action)[:, 0]
            before = chosen if case == "old_log_probs_recomputed" else old
            ratio = (chosen - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            fit = F.mse_loss(value, returns[:, None])
            entropy = -(logs.exp() * logs).sum(1).mean()
            loss = (gain if case == "advantage_sign" else -gain) + 0.5 * fit - bonus * entropy
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        if turn % 10 == 0:
            print(f"round {turn} loss {loss.item():.4f} reward {reward.mean():.3f}")
    print(f"quality (mean reward of a step): {reward_rate(agent):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
