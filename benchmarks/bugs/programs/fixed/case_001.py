import random
from collections import deque
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(1)
random.seed(1)


class Grid:
    N = 5
    pits = {(1, 1), (3, 2)}

    starts = [(0, 0), (0, 2), (0, 4), (1, 3), (2, 0), (2, 2), (3, 1), (3, 4), (4, 0), (4, 3)]

    def reset(self, start=None):
        self.p, self.t = start or random.choice(self.starts), 0
        return self.obs()

    def obs(self):
        v = torch.zeros(25)
        v[self.p[0] * 5 + self.p[1]] = 1
        return v

    def step(self, a):
        dr, dc = [(0, 1), (1, 0), (0, -1), (-1, 0)][a]
        r, c = min(4, max(0, self.p[0] + dr)), min(4, max(0, self.p[1] + dc))
        self.p, self.t = (r, c), self.t + 1
        if self.p == (4, 4):
            return self.obs(), 1.0, True
        if self.p in self.pits:
            return self.obs(), -1.0, True
        return self.obs(), -0.02, self.t >= 25


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(25, 48), nn.Linear(48, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
opt = torch.optim.Adam(policy_net.parameters(), lr=3e-3)
memory = deque(maxlen=3000)
env = Grid()


def learn(bs=32, gamma=0.95):
    batch = random.sample(memory, bs)
    s, a, r, s2, d = zip(*batch)
    s, s2 = torch.stack(s), torch.stack(s2)
    a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d, dtype=torch.float32)
    q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        target = r + gamma * (1 - d) * target_net(s2).max(1).values
    loss = F.smooth_l1_loss(q, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def greedy():
    total = 0.0
    with torch.no_grad():
        for start in env.starts:
            s, done = env.reset(start), False
            while not done:
                s, r, done = env.step(policy_net(s).argmax().item())
                total += r
    return total / len(env.starts)


s, loss, updates = env.reset(), 0.0, 0
for step in range(1, 2501):
    eps = max(0.15, 1 - step / 2200)
    if random.random() < eps:
        a = random.randrange(4)
    else:
        with torch.no_grad():
            a = policy_net(s).argmax().item()
    s2, r, done = env.step(a)
    memory.append((s, a, r, s2, done))
    s = env.reset() if done else s2
    if step > 500 and step % 4 == 0:
        loss = learn()
        updates += 1
        if updates % 25 == 0:
            target_net.load_state_dict(policy_net.state_dict())
    if step % 500 == 0:
        print(f"step {step} updates {updates} eps {eps:.2f} loss {loss:.4f}")
print("final greedy return", round(greedy(), 4))
