"""Predict the 90 % quantile of delivery times (pinball loss)."""
import numpy as np
import torch
from torch import nn


class Trips(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        dist = rng.gamma(2.0, 3.0, n)
        rain = rng.random(n) < 0.3
        hour = rng.integers(0, 24, n)
        rush = np.isin(hour, [7, 8, 9, 16, 17, 18])
        mean = 1.5 * dist + 6 * rain + 5 * rush
        y = mean + rng.exponential(0.5 + 0.35 * dist * (1 + rain), n)
        self.x = np.stack([dist / 6 - 1, rain, np.sin(hour / 24 * 6.283), np.cos(hour / 24 * 6.283), rush], 1).astype("float32")
        self.y = (y / 10).astype("float32")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class QuantileNet(nn.Module):
    def __init__(self, d_in, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x))


class PinballLoss(nn.Module):
    def __init__(self, tau):
        super().__init__()
        self.tau = tau

    def forward(self, pred, target):
        diff = target - pred
        return torch.maximum(self.tau * diff, (self.tau - 1) * diff).mean()


def main():
    torch.manual_seed(0)
    train = torch.utils.data.DataLoader(Trips(2560, 1), batch_size=128, shuffle=True)
    val = Trips(1000, 2)
    net = QuantileNet(5)
    criterion = PinballLoss(0.9)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(12):
        tot = 0.0
        for x, y in train:
            opt.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            opt.step()
            tot += loss.item()
        print(f"epoch {epoch:02d} pinball {tot / len(train):.4f}")
    net.eval()
    with torch.no_grad():
        q = net(torch.from_numpy(val.x)).squeeze(1).numpy()
    d = val.y - q
    return float(np.maximum(0.9 * d, -0.1 * d).mean())


if __name__ == "__main__":
    print(main())
