import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine, load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


class Embed(nn.Module):
    def __init__(self, d, h=64, e=8):
        super().__init__()
        self.l1 = nn.Linear(d, h)
        self.l2 = nn.Linear(h, e)

    def forward(self, x):
        return self.l2(F.relu(self.l1(x)))


def pairwise(e):
    diff = e.unsqueeze(1) - e.unsqueeze(0)
    d2 = (diff ** 2).sum(-1)
    return torch.sqrt(d2)


def contrastive_loss(e, y, margin=1.0):
    d = pairwise(e)
    same = (y[:, None] == y[None, :]).float()
    off = 1 - torch.eye(len(y))
    pos = (same * off * d ** 2).sum() / (same * off).sum()
    neg = ((1 - same) * F.relu(margin - d) ** 2).sum() / (1 - same).sum()
    return pos + neg


def main():
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    model = Embed(64)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 301):
        b = torch.randint(0, 1300, (64,))
        loss = contrastive_loss(model(x[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 60 == 0:
            with torch.no_grad():
                e = model(x)
                near = torch.cdist(e[1300:], e[:1300]).argmin(1)
                acc = (y[near] == y[1300:]).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} 1-nn acc {acc:.4f}")
    print("final 1-nn acc", round(acc, 4))


main()
