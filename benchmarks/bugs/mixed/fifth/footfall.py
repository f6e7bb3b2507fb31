"""Hourly visitor counts at many shops: autoregressive GRU with a negative-binomial head, rolled out a day ahead."""
import math, os, sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import NegativeBinomial

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
SHOPS, HOURS, CONTEXT, AHEAD = 40, 24 * 50, 48, 24


def make_counts(rng):
    t = np.arange(HOURS)
    level = np.exp(rng.normal(2.5, 0.8, SHOPS))
    peak, width = rng.uniform(9, 18, SHOPS), rng.uniform(2, 4, SHOPS)
    weekend = rng.choice([0.4, 1.8], SHOPS)
    rows = []
    for s in range(SHOPS):
        bump = np.exp(-0.5 * (((t % 24) - peak[s]) / width[s]) ** 2)
        day = np.where((t // 24) % 7 >= 5, weekend[s], 1.0)
        drift = np.exp(np.repeat(np.cumsum(rng.normal(0, 0.08, HOURS // 24)), 24))
        mean = level[s] * (0.15 + 2.5 * bump) * day * drift
        rows.append(rng.poisson(mean * rng.gamma(15, 1 / 15, HOURS)))
    return torch.tensor(np.stack(rows, axis=1), dtype=torch.float32)      # (hours, shops)


class Rollout(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.shop = nn.Embedding(SHOPS, 6)
        self.rnn = nn.GRU(1 + 6 + 4, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, 1)
        self.spread = nn.Linear(hidden, 1)
        if CASE == "variant_x":
            nn.init.orthogonal_(self.rnn.weight_hh_l0)
            nn.init.constant_(self.mean.bias, math.log(math.e - 1))

    def forward(self, last, clock, shop, scale, state=None):
        e = self.shop(shop)[:, None].expand(-1, last.size(1), -1)
        x = torch.cat([torch.log1p(last)[..., None] - torch.log1p(scale)[:, None, None], clock, e], dim=-1)
        h, state = self.rnn(x, state)
        mu = F.softplus(self.mean(h)).squeeze(-1)
        mu = mu * scale[:, None]
        size = F.softplus(self.spread(h)).squeeze(-1) * 10 + 1e-2
        return mu, size, state


def nb_nll(mu, size, y):
    logits = torch.log(mu + 1e-6) - torch.log(size)
    if CASE == "nb_logits":
        logits = torch.log(size) - torch.log(mu + 1e-6)
    return -NegativeBinomial(total_count=size, logits=logits).log_prob(y)


def clock_features(hours):
    a, w = hours * (2 * math.pi / 24), hours * (2 * math.pi / 168)
    return torch.stack([a.sin(), a.cos(), w.sin(), w.cos()], dim=-1)


def windows(series, starts, shops, length):
    pos = starts[:, None] + torch.arange(length)
    return series[shops[:, None], pos], pos


@torch.no_grad()
def day_ahead_error(model, series, scale, first):
    model.eval()
    shops = torch.arange(SHOPS).repeat(5)
    starts = first + 24 * torch.arange(5).repeat_interleave(SHOPS) + torch.arange(5).repeat_interleave(SHOPS) * 7
    y, pos = windows(series, starts, shops, CONTEXT + AHEAD)
    hours = pos.float()
    s = scale[shops]
    mu, _, state = model(y[:, :CONTEXT], clock_features(hours[:, 1:CONTEXT + 1]), shops, s)
    preds = [mu[:, -1:]]
    for k in range(1, AHEAD):
        mu, _, state = model(preds[-1], clock_features(hours[:, CONTEXT + k:CONTEXT + k + 1]), shops, s, state)
        preds.append(mu)
    model.train()
    err = (torch.cat(preds, 1) - y[:, CONTEXT:]).abs()
    return (err / s[:, None]).mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    counts = make_counts(np.random.default_rng(50 + SEED))
    series = counts.t().contiguous()
    if CASE == "series_view":
        series = counts.reshape(SHOPS, HOURS)
    split = HOURS - 24 * 10
    scale = series[:, :split].mean(1) + 1.0
    model = Rollout()
    steps = 400
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3) if CASE != "variant_x" else \
        torch.optim.NAdam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    length = CONTEXT + 25
    for step in range(1, steps + 1):
        shops = torch.randint(0, SHOPS, (24,))
        starts = torch.randint(0, split - length, (24,))
        y, pos = windows(series, starts, shops, length)
        hours = pos.float()
        inputs, target = y[:, :-1], y[:, 1:]
        if CASE == "lag_zero":
            inputs = y[:, 1:]
        mu, size, _ = model(inputs, clock_features(hours[:, 1:]), shops, scale[shops])
        nll = nb_nll(mu, size, target)
        loss = nll[:, 6:].mean()
        opt.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        opt.step()
        sched.step()
        if step % 100 == 0:
            print(f"step {step} nll {loss.item():.3f} day-ahead error {day_ahead_error(model, series, scale, split):.3f}")
    print("quality", round(day_ahead_error(model, series, scale, split), 4))


if __name__ == "__main__":
    main()
