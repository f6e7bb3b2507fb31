import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)
d = load_digits()
X, Y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(d.target)
pools = [torch.where(Y[:1200] == c)[0] for c in range(10)]


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
                                 nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def pk_batch(p=10, k=6):
    idx = torch.cat([pool[torch.randint(len(pool), (k,))] for pool in pools])
    return X[idx], Y[idx]


def batch_hard(e, y, margin=0.3):
    dist = ((e[:, None] - e[None]) ** 2).sum(-1).add(1e-8).sqrt()
    same = y[:, None] == y[None]
    hp = (dist * same).max(1).values
    hn = dist.masked_fill(same, 1e9).min(1).values
    return F.relu(hp - hn + margin).mean(), (hp > hn).float().mean()


net = Embed()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(1, 401):
    net.train()
    x, y = pk_batch()
    loss, frac = batch_hard(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 80 == 0:
        net.eval()
        with torch.no_grad():
            e = net(X)
        r = (Y[:1200][torch.cdist(e[1200:], e[:1200]).argmin(1)] == Y[1200:]).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} violated {frac:.3f} recall@1 {r:.4f}")
print("final recall@1", round(r, 4))
