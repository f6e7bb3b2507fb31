"""Causal convolution network for multi-step forecasting of several seasonal series."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

CH, CONTEXT, HORIZON = 3, 48, 12


def make_series(n, length, rng):
    """(n, length, CH): channels share seasons with own phases, levels and scales, plus a lagged coupling."""
    t = np.arange(length)
    out = np.zeros((n, length, CH))
    for i in range(n):
        ph = rng.uniform(0, 2 * np.pi, 2)
        a = np.sin(2 * np.pi * t / 12 + ph[0]) + 0.5 * np.sin(2 * np.pi * t / 7 + ph[1])
        b = 0.8 * np.roll(a, 3) + 0.4 * np.cos(2 * np.pi * t / 12 + ph[0])
        c = np.sign(np.sin(2 * np.pi * t / 12 + ph[0])) * 0.7 + 0.3 * np.roll(b, 2)
        x = np.stack([a, b, c], -1)[:, :]
        out[i] = x * np.array([20.0, 4.0, 60.0]) + np.array([150.0, 12.0, -80.0])
    out += rng.normal(size=out.shape) * np.array([1.0, 0.2, 3.0])
    return out[:, 6:]


class CausalConv(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(cin, cout, 3, dilation=dilation)

    def forward(self, x):
        if CASE == "c1":
            return self.conv(F.pad(x, (self.pad // 2, self.pad // 2)))
        return self.conv(F.pad(x, (self.pad, 0)))


class TCN(nn.Module):
    def __init__(self, hid=48):
        super().__init__()
        self.inp = CausalConv(CH, hid, 1)
        self.layers = nn.ModuleList(CausalConv(hid, hid, d) for d in (2, 4, 8))
        self.head = nn.Conv1d(hid, CH, 1)
        if CASE == "variant_x":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        if CASE == "c2":
            x_ = x.reshape(x.shape[0], CH, -1)
        else:
            x_ = x.transpose(1, 2)
        h = torch.relu(self.inp(x_))
        for l in self.layers:
            h = h + torch.relu(l(h))
        y = self.head(h).transpose(1, 2)
        if CASE == "variant_x":
            y = y + x
        return y


@torch.no_grad()
def forecast(model, ctx, steps):
    model.eval()
    seq = ctx
    for _ in range(steps):
        nxt = model(seq[:, -CONTEXT:])[:, -1:]
        seq = torch.cat([seq, nxt], 1)
    return seq[:, -steps:]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = make_series(200, 126, rng), make_series(60, 126, rng)
    mean, std = train.mean((0, 1)), train.std((0, 1))
    if CASE == "c4":
        tr = torch.tensor(train, dtype=torch.float32)
        te = torch.tensor((test - mean) / std, dtype=torch.float32)
    else:
        tr = torch.tensor((train - mean) / std, dtype=torch.float32)
        te = torch.tensor((test - mean) / std, dtype=torch.float32)
    model = TCN()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.6)
    batches_per_epoch = 50
    for epoch in range(12):
        model.train()
        for _ in range(batches_per_epoch):
            i = torch.randint(len(tr), (32,))
            s = torch.randint(tr.shape[1] - CONTEXT - 1, (32,))
            win = torch.stack([tr[a, b: b + CONTEXT + 1] for a, b in zip(i, s)])
            pred = model(win[:, :-1])
            if CASE == "variant_x":
                w = torch.linspace(0.2, 1.0, CONTEXT)[None, :, None]
                loss = (w * F.smooth_l1_loss(pred, win[:, 1:], reduction="none")).mean()
            else:
                loss = F.mse_loss(pred, win[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if CASE == "c3":
                sched.step()
        if CASE != "c3":
            sched.step()
        if epoch % 3 == 2:
            f = forecast(model, te[:, :CONTEXT], HORIZON)
            rmse = (f - te[:, CONTEXT: CONTEXT + HORIZON]).pow(2).mean().sqrt()
            print(f"epoch {epoch + 1} loss {loss.item():.4f} rollout rmse {rmse.item():.4f}")
    errs = []
    for s in (0, 20, 40):
        f = forecast(model, te[:, s: s + CONTEXT], HORIZON)
        errs.append((f - te[:, s + CONTEXT: s + CONTEXT + HORIZON]).pow(2).mean())
    print(f"FINAL quality (rollout rmse, standardized units, lower is better) {torch.stack(errs).mean().sqrt().item():.4f}")


if __name__ == "__main__":
    main()
