"""House prices: numeric columns plus categorical columns through embeddings."""
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F

CATS = {"district": 40, "type": 5, "condition": 6}
NUMS = ["area", "rooms", "age"]


def make_frame(n, seed):
    rng = np.random.default_rng(seed)
    eff = {c: np.random.default_rng(i + 50).normal(0, s, k) for i, ((c, k), s) in enumerate(zip(CATS.items(), [0.6, 0.3, 0.2]))}
    df = pd.DataFrame({c: rng.integers(0, k, n) for c, k in CATS.items()})
    df["area"] = rng.normal(0, 1, n)
    df["rooms"] = 0.7 * df["area"] + 0.7 * rng.normal(0, 1, n)
    df["age"] = rng.uniform(-1, 1, n)
    df["price"] = (0.5 * df["area"] + 0.1 * df["rooms"] - 0.3 * df["age"] ** 2
                   + sum(eff[c][df[c]] for c in CATS) + 0.05 * rng.normal(size=n))
    return df


class TabularModel(nn.Module):
    def __init__(self, cards, n_num, emb_dim=3, hidden=(96, 48)):
        super().__init__()
        self.embeds = [nn.Embedding(k, emb_dim) for k in cards]
        for e in self.embeds:
            nn.init.normal_(e.weight, std=0.01)
        self.bn = nn.BatchNorm1d(n_num)
        d = emb_dim * len(cards) + n_num
        layers = []
        for h in hidden:
            layers += [nn.Linear(d, h), nn.ReLU()]
            d = h
        self.layers = nn.Sequential(*layers, nn.Linear(d, 1))

    def forward(self, cat, num):
        e = torch.cat([emb(cat[:, i]) for i, emb in enumerate(self.embeds)], 1)
        return self.layers(torch.cat([e, self.bn(num)], 1)).squeeze(1)


def tensors(df):
    return (torch.tensor(df[list(CATS)].values), torch.tensor(df[NUMS].values, dtype=torch.float32),
            torch.tensor(df["price"].values, dtype=torch.float32))


def main():
    torch.manual_seed(8)
    cat, num, y = tensors(make_frame(5000, 1))
    vcat, vnum, vy = tensors(make_frame(1500, 2))
    model = TabularModel(list(CATS.values()), len(NUMS))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=2)
    for epoch in range(10):
        model.train()
        perm = torch.randperm(len(y))
        for b in perm.split(200):
            loss = F.mse_loss(model(cat[b], num[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            val = F.mse_loss(model(vcat, vnum), vy).item()
        sched.step(val)
        print(f"epoch {epoch} val mse {val:.4f}")
    return val


if __name__ == "__main__":
    print(main())
