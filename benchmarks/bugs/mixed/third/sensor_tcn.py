"""Forecasting the next values of one sensor from the recent past of four sensors with a dilated causal TCN."""
import copy
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
PAST, AHEAD, CH = 48, 1, 4


def simulate(n, rng):
    """Pump temperature driven by load and ambient temperature, with lags; the load level drifts over the weeks."""
    t = np.arange(n)
    load = np.zeros(n)
    level = 0.0
    for i in range(n):
        if rng.random() < 0.04:
            level = rng.normal(0, 1.0)
        load[i] = 0.8 * load[i - 1] + 0.2 * level if i else level
    load = load + 0.6 * t / n
    ambient = 5 * np.sin(2 * np.pi * t / 24) + 0.3 * rng.normal(size=n)
    flow = np.roll(load, 3) ** 2 + 0.05 * rng.normal(size=n)
    temp = np.zeros(n)
    for i in range(8, n):
        temp[i] = 0.5 * temp[i - 1] + 3.0 * np.tanh(load[i - 6]) + 0.25 * ambient[i - 8] + 0.1 * rng.normal()
    return np.stack([60 + temp, 20 + ambient, 100 + 10 * load, 5 + flow], 1).astype(np.float32)


def windows(z):
    starts = range(len(z) - PAST - AHEAD)
    x = np.stack([z[s:s + PAST] for s in starts])
    y = np.stack([z[s + PAST + AHEAD - 1, 0] for s in starts])
    return torch.from_numpy(x), torch.from_numpy(y)


class CausalBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = (0, 2 * dilation) if CASE == "c2" else (2 * dilation, 0)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        return x + self.drop(F.silu(self.conv(F.pad(x, self.pad))))


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Conv1d(CH, width, 1)
        self.blocks = nn.Sequential(*[CausalBlock(width, d) for d in (1, 2, 4, 8)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):                                      # x: (batch, time, channel)
        h = self.blocks(self.inp(x.transpose(1, 2)))[:, :, -1]
        if CASE == "c4":
            return F.relu(self.head(h))
        return self.head(h)


def objective(pred, y):
    if CASE != "c3":
        pred = pred.squeeze(-1)
    err = (pred - y).abs()
    if CASE == "variant_x":                                    # pinball at the median, with a quadratic part
        return 0.5 * err.mean() + 0.1 * err.square().mean()
    return torch.where(err < 1, 0.5 * err ** 2, err - 0.5).mean()


@torch.no_grad()
def mae(model, x, y, scale):
    model.eval()
    out = torch.cat([model(c) for c in x.split(256)]).squeeze(-1)
    model.train()
    return ((out - y).abs().mean() * scale).item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    series = simulate(3000, rng)
    train, test = series[:2200], series[2200:]
    mu, sd = train.mean(0), train.std(0)
    x, y = windows((train - mu) / sd)
    if CASE == "c1":
        xt, yt = windows((test - test.mean(0)) / test.std(0))
        yt = (yt * test[:, 0].std() + test[:, 0].mean() - mu[0]) / sd[0]
    else:
        xt, yt = windows((test - mu) / sd)
    model = Forecaster()
    steps = 400
    opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    if CASE == "variant_x":
        opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=steps, cycle_momentum=False)
    average = copy.deepcopy(model)
    print("persistence MAE %.3f" % ((xt[:, -1, 0] - yt).abs().mean() * sd[0]))
    for step in range(steps):
        pick = torch.from_numpy(rng.integers(len(x), size=48))
        loss = objective(model(x[pick]), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if CASE == "variant_x":
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters()):
                    a.lerp_(p, 0.05)
        if step % 100 == 99:
            print("step %d  loss %.4f  held-out MAE %.3f" % (step + 1, loss.item(), mae(model, xt, yt, sd[0])))
    final = average if CASE == "variant_x" else model
    print("final held-out MAE (degrees) %.4f" % mae(final, xt, yt, sd[0]))


if __name__ == "__main__":
    main()
