"""Churn table: categorical and numeric columns, entity embeddings, binary target; quality is held-out log-loss."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
CATS = {"city": 30, "plan": 6, "device": 12}


def make_table(n, rng, effects):
    table = {name: np.array([f"{name}_{k}" for k in rng.integers(0, size, n)]) for name, size in CATS.items()}
    table["income"] = rng.lognormal(10.5, 0.6, n)
    table["age"] = rng.uniform(18, 80, n)
    table["tenure"] = rng.exponential(24, n)
    score = -1.0 + sum(np.array([effects[v] for v in table[name]]) for name in CATS)
    score += 1.2 * np.sin((table["age"] - 18) / 10) - 0.9 * np.log1p(table["tenure"] / 12)
    score += 1.3 * (np.log(table["income"]) - 10.5) / 0.6 * np.array([1.0 if effects[v] > 0 else -1.0 for v in table["plan"]])
    table["churn"] = (rng.random(n) < 1 / (1 + np.exp(-1.5 * score))).astype(np.float32)
    return table


class Encoder:
    """Turns the columns into one integer matrix and one float matrix."""

    def fit(self, table):
        self.codes = {}
        for name in CATS:
            seen = list(dict.fromkeys(table[name]))
            self.codes[name] = {v: i for i, v in enumerate(seen)}
        numeric = self.numeric(table)
        self.mean, self.std = numeric.mean(0), numeric.std(0)
        return self

    @staticmethod
    def numeric(table):
        return np.stack([table["income"], table["age"], table["tenure"]], 1)

    def transform(self, table):
        cats = np.stack([[self.codes[name][v] for v in table[name]] for name in CATS], 1)
        numeric = self.numeric(table)
        if CASE != "b3":
            numeric = (numeric - self.mean) / self.std
        return torch.from_numpy(cats), torch.from_numpy(numeric.astype(np.float32)), torch.from_numpy(table["churn"])


class Net(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        dims = [8, 4, 6]
        self.embs = nn.ModuleList([nn.Embedding(size, d) for size, d in zip(CATS.values(), dims)])
        self.body = nn.Sequential(
            nn.Linear(sum(dims) + 3, hidden), nn.ReLU(), nn.Dropout(0.9 if CASE == "b4" else 0.1),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.9 if CASE == "b4" else 0.1))
        self.out = nn.Linear(hidden, 1)

    def forward(self, cats, numeric):
        parts = [emb(cats[:, i]) for i, emb in enumerate(self.embs)]
        h = self.body(torch.cat(parts + [numeric], 1))
        score = self.out(h).squeeze(1)
        return torch.sigmoid(score) if CASE == "b2" else score


@torch.no_grad()
def log_loss(model, data):
    model.eval()
    cats, numeric, y = data
    loss = F.binary_cross_entropy_with_logits(model(cats, numeric), y)
    model.train()
    return loss.item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    effects = {f"{name}_{k}": rng.normal(0, 1.3) for name, size in CATS.items() for k in range(size)}
    train_table, test_table = make_table(6000, rng, effects), make_table(2000, rng, effects)
    encoder = Encoder().fit(train_table)
    train = encoder.transform(train_table)
    if CASE == "b1":
        encoder = Encoder().fit(test_table)
    test = encoder.transform(test_table)
    base = train[2].mean().item()
    print(f"positive share {base:.3f}, log-loss of the constant {-(base * np.log(base) + (1 - base) * np.log(1 - base)):.4f}")
    model = Net()
    accumulate = 1
    if CASE == "variant_x":
        nn.init.constant_(model.out.bias, float(np.log(base / (1 - base))))
        opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95)
        accumulate, batch = 2, 64
    else:
        opt = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
        batch = 128
    cats, numeric, y = train
    for epoch in range(12):
        order = torch.randperm(len(y))
        total, micro = 0.0, 0
        opt.zero_grad()
        for i in range(0, len(order), batch):
            idx = order[i:i + batch]
            loss = F.binary_cross_entropy_with_logits(model(cats[idx], numeric[idx]), y[idx])
            (loss / accumulate).backward()
            micro += 1
            if micro % accumulate == 0:
                opt.step()
                opt.zero_grad()
            total += loss.item() * len(idx)
        print(f"epoch {epoch} train {total / len(y):.4f} test {log_loss(model, test):.4f}")
    print(f"quality {log_loss(model, test):.4f}")


if __name__ == "__main__":
    main()
