"""MLP with categorical embeddings for a price-like regression table."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

CARD = (12, 5)


def make_table(n, rng):
    area = rng.gamma(8.0, 15.0, n)
    year = rng.integers(1920, 2024, n).astype(float)
    dist = rng.exponential(6000.0, n)
    rooms = np.clip(np.round(area / 28 + rng.normal(size=n)), 1, 9)
    lat = rng.uniform(48.0, 48.4, n)
    lon = rng.uniform(2.1, 2.6, n)
    city = rng.integers(0, CARD[0], n)
    kind = rng.integers(0, CARD[1], n)
    eff_city = np.linspace(-1.0, 1.0, CARD[0])[(np.arange(CARD[0]) * 5) % CARD[0]]
    eff_kind = np.array([0.5, -0.4, 0.0, 0.3, -0.5])
    y = (0.01 * area * (1 + 0.4 * eff_city[city]) + 0.8 * np.exp(-dist / 5000) + 0.5 * np.abs(year - 1965) / 50
         + eff_kind[kind] * (rooms > 4) + 0.6 * np.sin(12 * (lat - 48.2)) * np.cos(8 * (lon - 2.3))
         + 0.1 * rng.normal(size=n))
    num = np.stack([area, year, dist, rooms, lat, lon], 1)
    return num, np.stack([city, kind], 1), y * 1000 + 2000


class Net(nn.Module):
    def __init__(self, nnum, p=0.3):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, 6) for c in CARD)
        layers, d = [], nnum + 12
        for h in (96, 96):
            layers += [nn.Linear(d, h), nn.ReLU(), nn.Dropout(p)]
            d = h
        layers.append(nn.Linear(d, 1))
        if CASE == "c3":
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers)

    def forward(self, num, cat):
        e = [m(cat[:, i]) for i, m in enumerate(self.embs)]
        return self.body(torch.cat([num] + e, 1))


@torch.no_grad()
def r2(model, num, cat, y):
    if CASE != "c4":
        model.eval()
    p = model(num, cat).squeeze(1)
    return 1 - ((p - y) ** 2).mean().item() / y.var(unbiased=False).item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    num, cat, y = make_table(7000, rng)
    order = rng.permutation(len(y))
    num, cat = num[order], cat[order]
    y = y[order]
    m, s = num[:6000].mean(0), num[:6000].std(0)
    if CASE == "c2":
        num = num - m / s
    else:
        num = (num - m) / s
    y = (y - y[:6000].mean()) / y[:6000].std()
    num, y = torch.tensor(num, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    cat = torch.tensor(cat)
    loader = DataLoader(TensorDataset(num[:6000], cat[:6000], y[:6000]), batch_size=128, shuffle=True)
    model = Net(num.shape[1])
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    ema = None
    if CASE == "variant_x":
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    for epoch in range(20):
        model.train()
        for a, b, t in loader:
            p = model(a, b)
            if CASE == "c1":
                loss = ((p - t) ** 2).mean()
            elif CASE == "variant_x":
                loss = F.huber_loss(p.squeeze(1), t, delta=0.5)
            else:
                loss = ((p.squeeze(1) - t) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if ema:
                ema.update_parameters(model)
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1} loss {loss.item():.4f} held-out R2 {r2(ema or model, num[6000:], cat[6000:], y[6000:]):.4f}")
    print(f"FINAL quality (held-out R2) {r2(ema or model, num[6000:], cat[6000:], y[6000:]):.4f}")


if __name__ == "__main__":
    main()
