"""Insurance claim counts with categorical columns and exposure."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

SIZES = dict(region=30, vehicle=15, use=6)


def make_policies(n, rng, effects):
    columns = {name: rng.integers(0, size, n) for name, size in SIZES.items()}
    age, power = rng.uniform(18, 80, n), rng.gamma(4.0, 25.0, n)
    exposure = np.exp(rng.uniform(np.log(0.05), np.log(4.0), n))
    log_rate = -0.2 + sum(effects[c][v] for c, v in columns.items())
    log_rate = log_rate + 0.9 * ((age - 45) / 25) ** 2 - 0.4 + 0.3 * (power - 100) / 50
    counts = rng.poisson(exposure * np.exp(np.minimum(log_rate, 3.0)))
    numeric = np.stack([(age - 49) / 18, (power - 100) / 50], 1)
    names = {c: np.array([f"{c}_{i}" for i in v]) for c, v in columns.items()}
    return names, numeric, exposure, counts


def encode(names, codebook=None):
    """Map category names to integer codes in the order of appearance."""
    codebook = {c: {} for c in names} if codebook is None else codebook
    columns = [[codebook[c].setdefault(v, len(codebook[c])) for v in names[c]] for c in names]
    return torch.tensor(columns).T, codebook


class RateModel(nn.Module):
    def __init__(self, width=8, hidden=48):
        super().__init__()
        sparse = CASE == "variant_x"
        self.tables = nn.ModuleList(nn.Embedding(s, width, sparse=sparse) for s in SIZES.values())
        self.body = nn.Sequential(nn.Linear(3 * width + 2, hidden), nn.ELU(), nn.Dropout(0.05),
                                  nn.Linear(hidden, hidden), nn.ELU())
        self.output = nn.Linear(hidden, 1)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)
        if CASE == "variant_x":
            nn.init.zeros_(self.output.weight)
            self.dispersion = nn.Parameter(torch.tensor(2.0))

    def forward(self, codes, numeric, exposure):
        parts = [table(codes[:, i]) for i, table in enumerate(self.tables)]
        log_rate = self.output(self.body(torch.cat(parts + [numeric], 1))).squeeze(1)
        offset = exposure if CASE == "case_d" else exposure.log()
        return (log_rate + offset).clamp(max=6.0).exp()


def objective(model, rate, y):
    if CASE == "variant_x":
        shape = F.softplus(model.dispersion) * 5
        total = torch.log(shape + rate)
        likelihood = torch.lgamma(y + shape) - torch.lgamma(shape) + shape * (shape.log() - total)
        return -(likelihood + y * (rate.log() - total)).mean()
    if CASE == "case_a":
        return F.poisson_nll_loss(rate, y)
    return F.poisson_nll_loss(rate, y, log_input=False)


def deviance(y, mu):
    return (2 * (torch.xlogy(y, y / mu) - (y - mu))).mean()


@torch.no_grad()
def explained(model, codes, numeric, exposure, y):
    model.eval()
    mu = model(codes, numeric, exposure).clamp(min=1e-6)
    model.train()
    null = exposure * y.sum() / exposure.sum()
    return (1 - deviance(y, mu) / deviance(y, null)).item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    effects = {c: 0.6 * rng.standard_normal(s) for c, s in SIZES.items()}
    names, *rest = make_policies(12000, rng, effects)
    test_names, *test_rest = make_policies(3000, rng, effects)
    codes, codebook = encode(names)
    test_codes, _ = encode(test_names) if CASE == "case_b" else encode(test_names, codebook)
    numeric, exposure, y = (torch.tensor(a, dtype=torch.float32) for a in rest)
    test = [test_codes] + [torch.tensor(a, dtype=torch.float32) for a in test_rest]
    if CASE == "case_c":
        y = y.reshape(-1, 1)
    model = RateModel()
    if CASE == "variant_x":
        dense = [p for n, p in model.named_parameters() if not n.startswith("tables")]
        optimizers = [torch.optim.Adam(dense, lr=3e-3), torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-2)]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)]
    for step in range(800):
        i = torch.randint(len(codes), (128,))
        loss = objective(model, model(codes[i], numeric[i], exposure[i]), y[i])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % 160 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} held-out explained {explained(model, *test):.4f}")
    print(f"final explained {explained(model, *test):.4f}")


if __name__ == "__main__":
    main()
