"""Survival of machines: a neural Cox model trained on the partial likelihood of mini-cohorts."""
import os
import sys

import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))


def cohort(n, rng):
    age = rng.gamma(4, 3, n)
    speed = rng.normal(1500, 300, n)
    hours = rng.lognormal(9, 0.6, n)
    heat = rng.normal(70, 8, n)
    vib = rng.exponential(0.5, n)
    vendor = rng.integers(0, 5, n)
    z = [(age - 12) / 6, (speed - 1500) / 300, (np.log(hours) - 9) / 0.6, (heat - 70) / 8, (vib - 0.5) / 0.5]
    vend = np.array([0.0, 0.6, -0.6, 1.0, -0.4])[vendor]
    risk = 0.9 * z[0] + 0.9 * np.abs(z[1]) + 0.7 * z[2] * (z[3] > 0) + 0.7 * z[3] - 0.5 * z[4] + vend
    t_event = rng.weibull(1.5, n) * 40 * np.exp(-risk / 1.5)
    t_cens = rng.exponential(60, n)
    table = np.stack([age, speed, hours, heat, vib], 1)
    return (torch.tensor(table, dtype=torch.float32), torch.tensor(vendor),
            torch.tensor(np.minimum(t_event, t_cens), dtype=torch.float32),
            torch.tensor(t_event <= t_cens))


class RiskNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.vendor = nn.Embedding(5, 4)
        self.l1 = nn.Linear(9, width)
        self.l2 = nn.Linear(width, width)
        self.bn = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 1, bias=False)
        if CASE == "e4":
            for layer in (self.l1, self.l2, self.out):
                nn.init.zeros_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, x, vendor):
        h = torch.tanh(self.l1(torch.cat([x, self.vendor(vendor)], 1)))
        h = torch.tanh(self.bn(self.l2(h)))
        return self.out(self.drop(h)).squeeze(1)


def partial_likelihood(risk, time, event):
    order = time.argsort(descending=CASE != "e1")
    risk, event = risk[order], event[order]
    at_risk = torch.logcumsumexp(risk, 0)
    if CASE == "e2":
        event = ~event
    return -(risk - at_risk)[event].mean()


@torch.no_grad()
def concordance(model, x, vendor, time, event):
    model.eval()
    risk = model(x, vendor)
    model.train()
    comparable = (time[:, None] < time[None]) & event[:, None]
    better = (risk[:, None] > risk[None]).float() + 0.5 * (risk[:, None] == risk[None]).float()
    return better[comparable].mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = cohort(4000, rng), cohort(1000, rng)
    mu, sd = train[0].mean(0), train[0].std(0)
    if CASE == "e3":
        sd = torch.ones_like(sd)
    xs, xt = (train[0] - mu) / sd, (test[0] - mu) / sd
    model = RiskNet()
    opt = torch.optim.Adamax(model.parameters(), lr=5e-3)
    accum, decay = 1, None
    if CASE == "variant_x":
        model.vendor.weight.requires_grad = False              # vendors keep their random codes
        accum, decay = 2, torch.optim.swa_utils.get_ema_multi_avg_fn(0.98)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
    for step in range(900):
        pick = torch.from_numpy(rng.choice(len(xs), 256 // accum, replace=False))
        loss = partial_likelihood(model(xs[pick], train[1][pick]), train[2][pick], train[3][pick])
        (loss / accum).backward()
        if (step + 1) % accum == 0:
            opt.step()
            opt.zero_grad()
            if decay is not None:
                ema.update_parameters(model)
        if step % 225 == 224:
            print("step %d  loss %.4f  held-out C-index %.4f" % (step + 1, loss.item(), concordance(model, xt, *test[1:])))
    final = ema if CASE == "variant_x" else model
    print("final held-out C-index %.4f" % concordance(final, xt, *test[1:]))


if __name__ == "__main__":
    main()
