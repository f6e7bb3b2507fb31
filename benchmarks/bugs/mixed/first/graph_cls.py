"""Graph isomorphism network that tells four families of small graphs apart."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

FEAT = 4


def make_one(kind, rng):
    """Same number of nodes and edges for all kinds; the wiring and where the marked nodes sit differ."""
    n = int(rng.integers(10, 17))
    ring = [(i, (i + 1) % n) for i in range(n)]
    edges = set(ring)
    while len(edges) < n + n // 2:
        i = int(rng.integers(n))
        if kind % 2 == 0:
            j = (i + 2) % n
        else:
            j = (i + int(rng.integers(4, n - 3))) % n
        if (i, j) not in edges and (j, i) not in edges and i != j:
            edges.add((i, j))
    feat = rng.integers(0, 2, n)
    k = n // 3
    feat[:] = 0
    if kind < 2:
        s = rng.integers(n)
        feat[(s + np.arange(k)) % n] = 1
    else:
        feat[(rng.integers(n) + np.arange(k) * (n // k)) % n] = 1
    x = np.zeros((n, FEAT))
    x[:, 0], x[:, 1] = feat, 1 - feat
    x[:, 2:] = rng.normal(size=(n, 2)) * 0.5
    perm = rng.permutation(n)
    e = np.array(sorted(edges)).T
    inv = np.empty(n, dtype=int)
    inv[perm] = np.arange(n)
    return x[perm], inv[e]


def make_set(n, rng):
    kinds = rng.integers(0, 4, n)
    return [make_one(int(k), rng) + (int(k),) for k in kinds]


def collate(graphs):
    xs, es, ids, ys, off = [], [], [], [], 0
    for g, (x, e, y) in enumerate(graphs):
        xs.append(x)
        es.append(e if CASE == "c1" else e + off)
        ids.append(np.full(len(x), g))
        ys.append(y)
        off += len(x)
    e = torch.tensor(np.concatenate(es, 1))
    e = torch.cat([e, e.flip(0)], 1)
    return torch.tensor(np.concatenate(xs), dtype=torch.float32), e, torch.tensor(np.concatenate(ids)), torch.tensor(ys)


class Conv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(cin, cout), nn.ReLU(), nn.Linear(cout, cout))
        if CASE == "c3":
            self.norm = nn.BatchNorm1d(cout, momentum=0.001)
        else:
            self.norm = nn.BatchNorm1d(cout)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, h, e):
        src, dst = e
        if CASE == "c2":
            agg = torch.zeros_like(h).index_add_(0, dst, h[dst])
        else:
            agg = torch.zeros_like(h).index_add_(0, dst, h[src])
        return torch.relu(self.norm(self.mlp((1 + self.eps) * h + agg)))


class GIN(nn.Module):
    def __init__(self, hid=32, depth=3):
        super().__init__()
        dims = [FEAT] + [hid] * depth
        convs = [Conv(a, b) for a, b in zip(dims[:-1], dims[1:])]
        self.convs = convs if CASE == "c4" else nn.ModuleList(convs)
        self.head = nn.Sequential(nn.Linear(hid * 2, hid), nn.ReLU(), nn.Linear(hid, 4))

    def forward(self, x, e, ids, n):
        h = x
        for c in self.convs:
            h = c(h, e)
        total = torch.zeros(n, h.shape[1]).index_add_(0, ids, h)
        count = torch.zeros(n).index_add_(0, ids, torch.ones(len(ids)))[:, None]
        return self.head(torch.cat([total / 12, total / count], 1))


@torch.no_grad()
def accuracy(model, graphs):
    model.eval()
    ok = 0
    for i in range(0, len(graphs), 100):
        x, e, ids, y = collate(graphs[i: i + 100])
        ok += (model(x, e, ids, len(y)).argmax(-1) == y).sum().item()
    return ok / len(graphs)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = make_set(2000, rng), make_set(500, rng)
    model = GIN()
    groups = [{"params": model.parameters()}]
    if CASE == "variant_x":
        model.convs[0].mlp[0].requires_grad_(False)
        decay = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
        plain = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.0)
    for step in range(500):
        model.train()
        idx = rng.integers(0, len(train), 64)
        x, e, ids, y = collate([train[i] for i in idx])
        loss = F.cross_entropy(model(x, e, ids, len(y)), y)
        opt.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        opt.step()
        if step % 125 == 124:
            print(f"step {step + 1} loss {loss.item():.4f} test acc {accuracy(model, test):.4f}")
    print(f"FINAL quality (test graph accuracy) {accuracy(model, test):.4f}")


if __name__ == "__main__":
    main()
