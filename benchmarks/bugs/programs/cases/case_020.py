import random
from collections import deque
import torch
import torch.nn as nn
import torch.nn.functional as F


class Maze:
    walls = {(1, 0), (1, 1), (3, 3), (3, 2), (3, 4)}

    def reset(self):
        self.p, self.t = (0, 0), 0
        return self.o()

    def o(self):
        v = torch.zeros(25)
        v[self.p[0] * 5 + self.p[1]] = 1.0
        return v

    def step(self, a):
        dr, dc = ((0, 1), (1, 0), (0, -1), (-1, 0))[a]
        q = (min(4, max(0, self.p[0] + dr)), min(4, max(0, self.p[1] + dc)))
        if q not in self.walls:
            self.p = q
        self.t += 1
        win = self.p == (4, 4)
        return self.o(), float(win), win, self.t >= 60


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(25, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))


def main():
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, tgt = QNet(), QNet()
    tgt.load_state_dict(q.state_dict())
    tgt.eval()
    opt = torch.optim.Adam(q.parameters(), lr=2e-3)
    buf, env = deque(maxlen=5000), Maze()
    o, upd, wins, loss = env.reset(), 0, 0, torch.zeros(())
    for step in range(1, 3001):
        eps = max(0.15, 1 - step / 2500)
        with torch.no_grad():
            a = random.randrange(4) if random.random() < eps else q(o).argmax().item()
        o2, r, done, trunc = env.step(a)
        buf.append((o, a, r, o2, done))
        wins += done
        o = env.reset() if done or trunc else o2
        if step >= 600 and step % 5 == 0:
            s, a, r, s2, d = zip(*random.sample(buf, 64))
            s, s2, a = torch.stack(s), torch.stack(s2), torch.tensor(a).unsqueeze(1)
            r, d = torch.tensor(r), torch.tensor(d, dtype=torch.float32)
            pred = q(s).gather(1, a).squeeze(1)
            with torch.no_grad():
                best = q(s2).argmax(1, keepdim=True)
                y = r + 0.95 * (1 - d) * tgt(s2).gather(1, best).squeeze(1)
            loss = F.smooth_l1_loss(pred, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            upd += 1
            if upd % 20 == 0:
                tgt.load_state_dict(q.state_dict())
        if step % 500 == 0:
            print(f"step {step} updates {upd} wins {wins} loss {loss.item():.5f}")
    o, end, tot = env.reset(), False, 0
    while not end:
        with torch.no_grad():
            o, r, done, trunc = env.step(q(o).argmax().item())
        tot += r
        end = done or trunc
    print("greedy path length", env.t)
    print("final greedy return", tot)


main()
