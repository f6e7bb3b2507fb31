import random
import numpy as np
import torch
import torch.nn as nn


class CliffBalance:
    """1-D balance: keep x within [-1, 1]; episode ends on failure; 0.1 for every step survived"""

    def reset(self):
        self.x, self.v, self.t = random.uniform(-0.3, 0.3), 0.0, 0
        return self._o()

    def _o(self):
        return np.array([self.x, self.v * 4, 1.0], dtype=np.float32)

    def step(self, a):
        self.v += 0.05 * (a - 1) + 0.12 * self.x + random.gauss(0, 0.01)
        self.x += self.v
        self.t += 1
        fail = abs(self.x) > 1
        return self._o(), 0.1, fail, self.t >= 60


class Agent:
    def __init__(self):
        self.q = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 3))
        self.t = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 3))
        self.t.load_state_dict(self.q.state_dict())
        self.opt = torch.optim.Adam(self.q.parameters(), lr=3e-3)
        self.buf, self.n = [], 0

    def act(self, o, eps):
        if random.random() < eps:
            return random.randrange(3)
        with torch.no_grad():
            return self.q(torch.from_numpy(o)).argmax().item()

    def update(self, gamma=0.97):
        o, a, r, o2, d = zip(*random.sample(self.buf, 64))
        o, o2 = torch.from_numpy(np.stack(o)), torch.from_numpy(np.stack(o2))
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d).float()
        pred = self.q(o)[torch.arange(64), a]
        with torch.no_grad():
            nxt = self.t(o2).max(1)[0]
            target = r + gamma * nxt * (1 - d)
        loss = nn.functional.mse_loss(pred, target)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10)
        self.opt.step()
        self.n += 1
        if self.n % 40 == 0:
            self.t.load_state_dict(self.q.state_dict())
        return loss.item(), pred.mean().item()


def main():
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    env, agent = CliffBalance(), Agent()
    o, l, qm = env.reset(), 0, 0
    for step in range(1, 1801):
        a = agent.act(o, max(0.1, 1 - step / 1200))
        o2, r, fail, trunc = env.step(a)
        agent.buf.append((o, a, r, o2, fail))
        o = env.reset() if fail or trunc else o2
        if step > 200 and step % 3 == 0:
            l, qm = agent.update()
        if step % 300 == 0:
            print(f"step {step} loss {l:.4f} mean q {qm:.3f}")
    lens = []
    for _ in range(20):
        o, end = env.reset(), False
        while not end:
            o, r, fail, trunc = env.step(agent.act(o, 0.0))
            end = fail or trunc
        lens.append(env.t)
    print("final mean episode length", sum(lens) / 20)


main()
