"""Fraud detection on card transactions: about 4 % positives."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Cfg:
    n_train: int = 8000
    n_test: int = 4000
    dim: int = 10
    lr: float = 2e-3
    batch: int = 256
    epochs: int = 8


def transactions(n, dim, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    s = x[:, 0] + 0.8 * x[:, 1] * x[:, 2] + 0.6 * x[:, 3] + 0.5 * torch.randn(n, generator=g)
    return x, (s > 2.7).float()


class Detector(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.drop(torch.relu(self.fc1(x)))
        h = self.drop(torch.relu(self.fc2(h)))
        return self.fc3(h).squeeze(-1)


def f1(model, x, y):
    model.eval()
    with torch.no_grad():
        p = (model(x) > 0).float()
    model.train()
    tp = (p * y).sum()
    return (2 * tp / (p.sum() + y.sum()).clamp(min=1)).item()


def main():
    cfg = Cfg()
    torch.manual_seed(17)
    x, y = transactions(cfg.n_train, cfg.dim, 1)
    xt, yt = transactions(cfg.n_test, cfg.dim, 2)
    n_pos = y.sum()
    n_neg = len(y) - n_pos
    weight = torch.sqrt(n_pos / n_neg)
    model = Detector(cfg.dim)
    criterion = nn.BCEWithLogitsLoss(pos_weight=weight)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=1e-4)
    for epoch in range(cfg.epochs):
        perm = torch.randperm(len(x))
        for i in range(0, len(x), cfg.batch):
            idx = perm[i:i + cfg.batch]
            loss = criterion(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f} f1 {f1(model, xt, yt):.3f}")
    return f1(model, xt, yt)


if __name__ == "__main__":
    print(main())
