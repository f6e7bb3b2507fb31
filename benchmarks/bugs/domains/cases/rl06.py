"""Policy gradient for a lander that must brake before the ground."""
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Lander:
    """Height and speed; action 1 fires the engine. Reward at touchdown for being slow, a small cost for fuel."""

    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.n = n

    def reset(self):
        self.h = 8 + 4 * torch.rand(self.n, generator=self.g)
        self.v = -torch.rand(self.n, generator=self.g)
        self.alive = torch.ones(self.n)
        return self._obs()

    def _obs(self):
        return torch.stack([self.h / 10, self.v / 3, torch.ones(self.n)], -1)

    def step(self, a):
        self.v = self.v - 0.35 + 0.8 * a.float()
        self.h = self.h + self.v
        landed = (self.h <= 0).float() * self.alive
        away = (self.h > 14).float() * self.alive
        reward = landed * (1.0 - 0.5 * self.v.abs()) - away * 2.0 - 0.01 * a.float() * self.alive
        valid = self.alive.clone()
        self.alive = self.alive * (1 - landed) * (1 - away)
        self.h = self.h.clamp(0, 14)
        return self._obs(), reward, valid


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, o):
        return Categorical(logits=self.net(o))


def play(env, policy, horizon=40):
    obs, acts, rews, masks = [], [], [], []
    o = env.reset()
    with torch.no_grad():
        for _ in range(horizon):
            a = policy(o).sample()
            obs.append(o)
            acts.append(a)
            o, r, m = env.step(a)
            rews.append(r)
            masks.append(m)
            if env.alive.sum() == 0:
                break
        rews[-1] = rews[-1] - 2.0 * env.alive
    return torch.stack(obs), torch.stack(acts), torch.stack(rews), torch.stack(masks)


def compute_returns(rewards, gamma):
    returns = torch.zeros_like(rewards)
    running = torch.zeros(rewards.size(1))
    for t in range(len(rewards)):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns


def main():
    torch.manual_seed(6)
    env = Lander(64, 6)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for it in range(150):
        obs, acts, rews, mask = play(env, policy)
        ret = compute_returns(rews, 0.99)
        mean = (ret * mask).sum() / mask.sum()
        std = (((ret - mean) ** 2 * mask).sum() / mask.sum()).sqrt()
        adv = (ret - mean) / (std + 1e-6)
        logp = policy(obs).log_prob(acts)
        loss = -(logp * adv * mask).sum() / mask.sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 30 == 0:
            print(f"iter {it} return {rews.sum(0).mean().item():.3f}")
    scores = [play(env, policy)[2].sum(0).mean().item() for _ in range(4)]
    return sum(scores) / 4


if __name__ == "__main__":
    print(main())
