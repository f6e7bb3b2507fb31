import torch
import torch.nn as nn
from torch.distributions import Categorical


class Corridor:
    """walk right to the goal; stepping left first gives a small immediate treat"""

    def __init__(self, n=7, limit=20):
        self.n, self.limit = n, limit

    def reset(self):
        self.s, self.t, self.treat = 2, 0, True
        return self.obs()

    def obs(self):
        v = torch.zeros(self.n + 1)
        v[self.s] = 1
        v[-1] = self.t / self.limit
        return v

    def step(self, a):
        self.t += 1
        r = -0.05
        self.s = max(0, self.s - 1) if a == 0 else self.s + 1
        if self.s == 0 and self.treat:
            r, self.treat = 0.3, False
        if self.s == self.n - 1:
            return self.obs(), 2.0, True
        return self.obs(), r, self.t >= self.limit


class Policy(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(d, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        return torch.log_softmax(self.fc2(torch.relu(self.fc1(x))), -1)


def compute_returns(rewards, gamma=0.95):
    out, R = [], 0.0
    for r in reversed(rewards):
        R = r + gamma * R
        out.insert(0, R)
    out = torch.tensor(out)
    return out


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    env = Corridor()
    pi = Policy(8)
    opt = torch.optim.Adam(pi.parameters(), lr=5e-3)
    history, baseline = [], 0.0
    for ep in range(1, 401):
        s, done = env.reset(), False
        logps, rewards = [], []
        while not done:
            dist = Categorical(logits=pi(s))
            a = dist.sample()
            logps.append(dist.log_prob(a))
            s, r, done = env.step(a.item())
            rewards.append(r)
        G = compute_returns(rewards)
        adv = G - baseline
        baseline = 0.95 * baseline + 0.05 * G.mean().item()
        loss = -(torch.stack(logps) * adv).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(sum(rewards))
        if ep % 80 == 0:
            print(f"episode {ep} loss {loss.item():.4f} mean reward {sum(history[-40:]) / 40:.3f}")
    print("final mean reward", round(sum(history[-60:]) / 60, 4))


main()
