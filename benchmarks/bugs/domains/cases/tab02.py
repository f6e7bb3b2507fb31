"""Rare-event classifier: weighted sampler, focal loss, prior bias on the head, large decoupled weight decay."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def make(n, seed):
    r = np.random.RandomState(seed)
    x = r.randn(n, 12)
    s = 1.4 * x[:, 0] * x[:, 1] + x[:, 2] - 0.8 * np.abs(x[:, 3]) + 0.3 * r.randn(n)
    y = (s > 2.6).astype("float32")
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def focal(logits, y, gamma=2.0, alpha=0.5):
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    p = torch.sigmoid(logits)
    pt = torch.where(y > 0.5, p, 1 - p)
    a = torch.where(y > 0.5, alpha, 1 - alpha)
    return (a * (1 - pt) ** gamma * ce).mean()


class Net(nn.Module):
    def __init__(self, prior):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 1)
        nn.init.constant_(self.head.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.head(self.net(x)).squeeze(-1)


def auc(score, y):
    order = np.argsort(score)
    rank = np.empty(len(score))
    rank[order] = np.arange(1, len(score) + 1)
    pos = y > 0.5
    n1, n0 = pos.sum(), (~pos).sum()
    return float((rank[pos].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def main():
    torch.manual_seed(10)
    x, y = make(6000, 1)
    xt, yt = make(4000, 2)
    share = y.mean().item()
    w = torch.where(y > 0.5, 0.25 / share, 0.75 / (1 - share))
    sampler = WeightedRandomSampler(w, 128 * 20, replacement=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=128, sampler=sampler)
    net = Net(0.25)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, epochs=12, steps_per_epoch=len(loader))
    for epoch in range(12):
        net.train()
        for xb, yb in loader:
            loss = focal(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        net.eval()
        with torch.no_grad():
            a = auc(net(xt).numpy(), yt.numpy())
        print(epoch, round(loss.item(), 4), round(a, 4))
    return a


if __name__ == "__main__":
    print(main())
