"""Quantile forecast of an household's hourly load with an LSTM encoder and decoder."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

PAST, FUTURE = 36, 12
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def households(n, hours, rng):
    """Each home has its own daily profile; weather (known ahead) and a slow drift act on it."""
    t = np.arange(hours)
    phase, size = rng.uniform(0, 24, (n, 1)), rng.uniform(0.5, 1.5, (n, 1))
    peak = rng.uniform(-0.6, 0.6, (n, 1))
    weather, drift = np.zeros((n, hours)), np.zeros((n, hours))
    for i in range(1, hours):
        weather[:, i] = 0.95 * weather[:, i - 1] + 0.3 * rng.standard_normal(n)
        drift[:, i] = 0.98 * drift[:, i - 1] + 0.06 * rng.standard_normal(n)
    day = np.sin(2 * np.pi * (t - phase) / 24) + peak * np.cos(4 * np.pi * (t - phase) / 24)
    load = size * day + 0.4 * np.abs(weather) + 0.4 * drift
    load = load + 0.1 * rng.standard_normal(load.shape)
    clock = np.broadcast_to(np.stack([np.sin(2 * np.pi * t / 24), np.cos(2 * np.pi * t / 24)], 1), (n, hours, 2))
    known = np.concatenate([clock, weather[..., None]], 2)
    return torch.tensor(load, dtype=torch.float32), torch.tensor(known, dtype=torch.float32)


def windows(load, known, homes, starts):
    index = starts[:, None] + torch.arange(PAST + FUTURE)
    y, k = load[homes[:, None], index], known[homes[:, None], index]
    past = torch.cat([y[:, :PAST, None], k[:, :PAST]], -1)
    return past, k[:, PAST:], y[:, PAST:]


class Forecaster(nn.Module):
    def __init__(self, known=3, hidden=48):
        super().__init__()
        self.encoder = nn.LSTM(1 + known, hidden, batch_first=CASE != "case_b")
        self.bridge = nn.Linear(hidden, hidden)
        self.decoder = nn.LSTMCell(1 + known, hidden)
        self.quantiles = nn.Linear(hidden, len(QUANTILES))
        if CASE == "case_d":
            for p in self.parameters():
                nn.init.constant_(p, 0.05)

    def forward(self, past, known, y=None, forced=1.0):
        summary = self.encoder(past)[0][:, -1]
        h, c = torch.tanh(self.bridge(summary)), torch.zeros_like(summary)
        previous, outputs = past[:, -1, :1], []
        for t in range(known.shape[1]):
            use_actual = y is not None and torch.rand(()) < forced
            if use_actual and CASE == "case_c":
                previous = y[:, t, None]
            h, c = self.decoder(torch.cat([previous, known[:, t]], 1), (h, c))
            outputs.append(self.quantiles(h))
            previous = outputs[-1][:, 1:2].detach()
            if use_actual and CASE != "case_c":
                previous = y[:, t, None]
        return torch.stack(outputs, 1)


def pinball(prediction, target):
    error = target.unsqueeze(-1) - prediction
    if CASE == "case_a":
        error = prediction - target.unsqueeze(-1)
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


@torch.no_grad()
def evaluate(model, load, known, homes, starts):
    model.eval()
    past, ahead, y = windows(load, known, homes, starts)
    prediction = model(past, ahead)
    model.train()
    p, y, q = prediction.numpy(), y.numpy()[..., None], QUANTILES.numpy()
    score = np.where(y >= p, q * (y - p), (1 - q) * (p - y)).mean()
    return float(score), float(np.abs(p[..., 1:2] - y).mean())


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = households(200, 24 * 8, rng), households(300, PAST + FUTURE, rng)
    held_out = torch.arange(300), torch.zeros(300, dtype=torch.long)
    model = Forecaster()
    if CASE == "variant_x":
        optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    steps = 400
    for step in range(steps):
        homes, starts = torch.randint(200, (48,)), torch.randint(24 * 8 - PAST - FUTURE, (48,))
        past, ahead, y = windows(*train, homes, starts)
        forced = max(0.0, 1 - 1.5 * step / steps) if CASE == "variant_x" else 0.5
        loss = pinball(model(past, ahead, y, forced), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        if (step + 1) % 80 == 0:
            final = average if CASE == "variant_x" else model
            score, mae = evaluate(final, *test, *held_out)
            print(f"step {step + 1} loss {loss.item():.4f} held-out pinball {score:.4f} mae {mae:.4f}")
    print(f"final pinball {score:.4f}")


if __name__ == "__main__":
    main()
