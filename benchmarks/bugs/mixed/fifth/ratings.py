"""Credit grades (7 ordered classes) from a mixed table: ordinal network with cumulative logits (CORAL style)."""
import os, sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
GRADES = 7
SECTORS = ["steel", "retail", "energy", "media", "transport", "food", "banking", "mining", "telecom", "housing"]
REGIONS = ["north", "south", "east", "west", "islands", "capital"]
MISSING = -9999.0


def make_table(n, rng, effects):
    sector, region = rng.choice(SECTORS, n), rng.choice(REGIONS, n)
    num = rng.normal(0, 1, (n, 6))
    num[:, 1] = np.exp(num[:, 1])
    s = np.array([effects["sector"][x] for x in sector])
    r = np.array([effects["region"][x] for x in region])
    risk = 1.2 * num[:, 0] - 0.8 * np.log(num[:, 1]) + 0.8 * num[:, 2] * num[:, 3] + 0.6 * num[:, 4] + s + r
    risk += rng.normal(0, 0.4, n)
    grade = np.digitize(risk, [-2.6, -1.5, -0.5, 0.5, 1.5, 2.6])
    num[:, 1] *= 1000.0
    num[rng.random((n, 6)) < 0.04] = MISSING
    return {"sector": sector, "region": region, "num": num, "grade": grade}


class Coder:
    """String categories to integer codes."""

    def __init__(self):
        self.codes = {}

    def fit(self, values):
        self.codes = {}
        for v in values:
            self.codes.setdefault(v, len(self.codes))
        return self

    def apply(self, values):
        return torch.tensor([self.codes[v] for v in values])


class Scaler:
    def fit(self, x):
        ok = x != MISSING
        if CASE == "raw_gap":
            ok = np.isfinite(x)
        m = np.where(ok, x, np.nan)
        self.mean, self.std = np.nanmean(m, axis=0), np.nanstd(m, axis=0)
        return self

    def apply(self, x):
        ok = x != MISSING
        if CASE == "raw_gap":
            ok = np.isfinite(x)
        z = np.where(ok, (x - self.mean) / self.std, 0.0)
        return torch.tensor(np.concatenate([z, ~ok], axis=1), dtype=torch.float32)


class GradeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.sector, self.region = nn.Embedding(len(SECTORS), 6), nn.Embedding(len(REGIONS), 4)
        self.body = nn.Sequential(nn.Linear(22, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Dropout(0.1),
                                  nn.Linear(64, 64), nn.BatchNorm1d(64), nn.SiLU())
        self.score = nn.Linear(64, 1, bias=False)
        self.cuts = nn.Parameter(torch.linspace(1.5, -1.5, GRADES - 1))
        if CASE == "variant_x":
            for p in self.sector.parameters():
                p.requires_grad_(False)

    def forward(self, sector, region, num):
        x = torch.cat([self.sector(sector), self.region(region), num], dim=1)
        return self.score(self.body(x)) + self.cuts


def ordinal_loss(logits, grade):
    steps = torch.arange(GRADES - 1)
    levels = (grade[:, None] > steps).float()
    if CASE == "level_flip":
        levels = (grade[:, None] < steps).float()
    return F.binary_cross_entropy_with_logits(logits, levels)


@torch.no_grad()
def grade_error(model, data):
    model.eval()
    pred = (model(*data[:3]) > 0).sum(1)
    model.train()
    return (pred - data[3]).abs().float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(70 + SEED)
    effects = {"sector": dict(zip(SECTORS, rng.permutation(np.linspace(-2.4, 2.4, 10)))),
               "region": dict(zip(REGIONS, rng.permutation(np.linspace(-1.2, 1.2, 6))))}
    raw_train, raw_test = make_table(6000, rng, effects), make_table(1500, rng, effects)
    scaler = Scaler().fit(raw_train["num"])
    sector, region = Coder().fit(raw_train["sector"]), Coder().fit(raw_train["region"])
    parts = []
    for raw in (raw_train, raw_test):
        if CASE == "refit_codes":
            sector, region = Coder().fit(raw["sector"]), Coder().fit(raw["region"])
        parts.append([sector.apply(raw["sector"]), region.apply(raw["region"]), scaler.apply(raw["num"]),
                      torch.tensor(raw["grade"])])
    train, test = parts
    model = GradeNet()
    decay = 1.0 if CASE == "decay_one" else 1e-4
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=decay)
    if CASE == "variant_x":
        opt = torch.optim.RAdam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    steps = 800
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.2 if CASE != "variant_x" else 1e-2, total_steps=steps,
                                                cycle_momentum=False)
    for step in range(1, steps + 1):
        idx = torch.randint(0, 6000, (128,))
        sec, reg, num, grade = (t[idx] for t in train)
        if CASE == "two_draws":
            grade = train[3][torch.randint(0, 6000, (128,))]
        loss = ordinal_loss(model(sec, reg, num), grade)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.3f} mean grade error {grade_error(model, test):.3f}")
    print("quality", round(grade_error(model, test), 4))


if __name__ == "__main__":
    main()
