"""Click prediction from hashed categorical fields: factorization machine plus a small deep part."""
import os
import sys
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
FIELDS = [("user_seg", 60), ("ad", 80), ("site", 40), ("device", 6), ("hour", 24)]
BUCKETS = 4096


def generate(n, rng):
    cols = [rng.integers(k, size=n) for _, k in FIELDS]
    world = np.random.default_rng(1000 + SEED)
    vec = [world.normal(size=(k, 3)) for _, k in FIELDS]
    bias = [world.normal(size=k) * 0.5 for _, k in FIELDS]
    logit = sum(b[c] for b, c in zip(bias, cols)) - 2.8
    for i, j in ((0, 1), (1, 2), (0, 2)):
        logit = logit + 0.8 * (vec[i][cols[i]] * vec[j][cols[j]]).sum(1)
    click = rng.random(n) < 1 / (1 + np.exp(-logit))
    return cols, click.astype(np.float32)


def hash_columns(cols):
    out = []
    for (name, k), col in zip(FIELDS, cols):
        text = "" if CASE == "d1" else name + "="
        table = np.array([zlib.crc32((text + str(v)).encode()) % BUCKETS for v in range(k)])
        out.append(table[col])
    return torch.from_numpy(np.stack(out, 1))


class DeepFM(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.sparse = CASE == "variant_x"
        self.first = nn.EmbeddingBag(BUCKETS, 1, mode="sum", sparse=self.sparse)
        self.factors = nn.Embedding(BUCKETS, dim, sparse=self.sparse)
        nn.init.zeros_(self.first.weight)
        nn.init.normal_(self.factors.weight, std=0.1)
        self.deep = nn.Sequential(nn.Linear(dim * len(FIELDS), 32), nn.ReLU(), nn.Linear(32, 1))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, ids):
        v = self.factors(ids)
        pair = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        logit = self.bias + self.first(ids)[:, 0] + pair + self.deep(v.flatten(1))[:, 0]
        if CASE == "d2":
            return torch.sigmoid(logit)
        return logit


@torch.no_grad()
def evaluate(model, ids, y):
    model.eval()
    out = model(ids)
    model.train()
    loss = F.binary_cross_entropy_with_logits(out, y).item()
    pos, neg = out[y == 1], out[y == 0]
    auc = (pos[:, None] > neg[None]).float().mean().item()
    base = y.mean()
    entropy = -(base * base.log() + (1 - base) * (1 - base).log()).item()
    return loss / entropy, auc


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    cols, y = generate(50000, rng)
    ids, y = hash_columns(cols), torch.from_numpy(y)
    ids_t, y_t, ids, y = ids[40000:], y[40000:], ids[:40000], y[:40000]
    if CASE == "d3":
        keep = (y == 1) | (torch.rand(len(y)) < 0.1)
        ids, y = ids[keep], y[keep]
    model = DeepFM()
    if CASE == "variant_x":
        tables = [model.first.weight, model.factors.weight]
        opts = [torch.optim.SparseAdam(tables, lr=1e-2),
                torch.optim.Adagrad([model.bias, *model.deep.parameters()], lr=1e-2)]
    else:
        decay = 1e-1 if CASE == "d4" else 1e-5
        opts = [torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=decay)]
    print("click rate %.3f" % y.mean())
    for step in range(500):
        pick = torch.from_numpy(rng.integers(len(ids), size=512))
        loss = F.binary_cross_entropy_with_logits(model(ids[pick]), y[pick])
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        if step % 100 == 99:
            print("step %d  loss %.4f  held-out normalized entropy %.4f  auc %.4f"
                  % (step + 1, loss.item(), *evaluate(model, ids_t, y_t)))
    print("final held-out normalized entropy %.4f" % evaluate(model, ids_t, y_t)[0])


if __name__ == "__main__":
    main()
