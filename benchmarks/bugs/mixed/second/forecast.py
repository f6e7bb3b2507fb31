"""Hourly load forecasting: a dilated causal convolution network predicts the value 6 hours ahead."""
import os
import sys
import copy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
WINDOW, AHEAD = 48, 6


def make_series(n, rng):
    t = np.arange(n)
    noise = np.zeros(n)
    for i in range(1, n):
        noise[i] = 0.8 * noise[i - 1] + rng.normal(0, 0.15)
    phase = 0.8 * np.sin(2 * np.pi * t / 400)
    amp = 1.0 + 0.5 * np.sin(2 * np.pi * t / 168)
    y = 50 + 12 * (amp * np.sin(2 * np.pi * t / 24 + phase) + 0.4 * np.sin(2 * np.pi * t / 8) + noise)
    return y.astype(np.float32)


def windows(series, ahead):
    last = len(series) - WINDOW - AHEAD
    x = np.stack([series[i:i + WINDOW] for i in range(last)])
    y = np.array([series[i + WINDOW - 1 + ahead] for i in range(last)])
    return torch.from_numpy(x), torch.from_numpy(y)


class CausalConv(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(cin, cout, 3, dilation=dilation)

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class TCN(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.inp = CausalConv(1, ch, 1)
        self.layers = nn.ModuleList([CausalConv(ch, ch, d) for d in (2, 4, 8)])
        self.head = nn.Linear(ch, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x[:, None]))
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        out = self.head(h[:, :, -1])
        return out if CASE == "b1" else out.squeeze(-1)


@torch.no_grad()
def rmse(model, x, y, std):
    model.eval()
    pred = model(x).reshape(-1)
    model.train()
    return ((pred - y).pow(2).mean().sqrt() * std).item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    series = make_series(4200, rng)
    cut = 3400
    mean, std = series[:cut].mean(), series[:cut].std()
    scaled = (series - mean) / std
    x, y = windows(scaled[:cut], 0 if CASE == "b3" else AHEAD)
    xt, yt = windows(scaled[cut:], AHEAD)
    model = TCN()
    epochs, batch = 12, 64
    if CASE == "variant_x":
        opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=4, eta_min=1e-3)
        average = copy.deepcopy(model).requires_grad_(False)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=2e-3)
        sched = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.4)
    for epoch in range(epochs):
        order = torch.randperm(len(x))
        total = 0.0
        for i in range(0, len(order), batch):
            idx = order[i:i + batch]
            if CASE != "b4":
                opt.zero_grad()
            pred = model(x[idx])
            loss = F.mse_loss(pred, y[idx]) if CASE != "variant_x" else F.huber_loss(pred, y[idx], delta=1.5)
            loss.backward()
            if CASE == "variant_x":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if CASE == "variant_x":
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.parameters()):
                        a.lerp_(p, 0.02)
            if CASE == "b2":
                sched.step()
            total += loss.item() * len(idx)
        if CASE != "b2":
            sched.step()
        print(f"epoch {epoch} train loss {total / len(x):.4f} test rmse {rmse(model, xt, yt, std):.3f}")
    final = average if CASE == "variant_x" else model
    print(f"persistence rmse {((xt[:, -1] - yt).pow(2).mean().sqrt() * std).item():.3f}")
    print(f"quality {rmse(final, xt, yt, std):.4f}")


if __name__ == "__main__":
    main()
