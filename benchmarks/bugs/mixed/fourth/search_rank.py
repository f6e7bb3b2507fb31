"""Learning to rank: documents of a query are scored with a two-tower model and a listwise loss."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

DOCS, QUERY_DIM, DOC_DIM = 20, 5, 8


def make_queries(n, rng, world):
    """Query features, document features, grades 0 to 4 and a mask for real documents."""
    q = rng.standard_normal((n, QUERY_DIM))
    d = rng.standard_normal((n, DOCS, DOC_DIM))
    match = np.einsum("nq,qd,nkd->nk", q, world, d) / 2
    utility = match + 0.7 * np.abs(d[..., 0]) - 0.8 * d[..., 1] + 0.15 * rng.standard_normal((n, DOCS))
    real = np.arange(DOCS) < rng.integers(10, DOCS + 1, (n, 1))
    cuts = np.array([0.0, 0.8, 1.6, 2.5])
    grades = (utility[..., None] > cuts).sum(-1) * real
    d[..., 0] = 4000 + 2500 * d[..., 0]      # price
    d[..., 2] = 20000 + 9000 * d[..., 2]     # popularity
    d = d * real[..., None]
    return [torch.tensor(a, dtype=torch.float32) for a in (q, d, grades)] + [torch.tensor(real)]


def standardise(train, test):
    real = train[3]
    mean, std = train[1][real].mean(0), train[1][real].std(0)
    for part in (train, test):
        part[1] = (part[1] - mean) / std * part[3].unsqueeze(-1)


class Ranker(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(QUERY_DIM, hidden), nn.Tanh())
        self.document = nn.Sequential(nn.Linear(DOC_DIM, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.head = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, q, d):
        u, v = self.query(q).unsqueeze(1), self.document(d)
        joint = torch.cat([u * v, v], -1)
        return self.head(joint).squeeze(-1)


def batch(data, index, rng):
    q, d, grades, real = (a[index] for a in data)
    order = torch.from_numpy(rng.permuted(np.tile(np.arange(DOCS), (len(index), 1)), axis=1))
    d = d.gather(1, order.unsqueeze(-1).expand_as(d))
    real = real.gather(1, order)
    if CASE != "case_b":
        grades = grades.gather(1, order)
    return q, d, grades, real


def listwise(scores, grades, real):
    hidden = real if CASE == "case_a" else ~real
    scores = scores.masked_fill(hidden, -1e4)
    target = grades.masked_fill(hidden, -1e4).softmax(1)
    return -(target * scores.log_softmax(1)).sum(1).mean()


def pairwise(scores, grades, real):
    better = (grades.unsqueeze(2) > grades.unsqueeze(1)) & real.unsqueeze(2) & real.unsqueeze(1)
    difference = scores.unsqueeze(2) - scores.unsqueeze(1)
    return F.softplus(-difference[better]).mean()


@torch.no_grad()
def ndcg(model, data, k=5):
    model.eval()
    q, d, grades, real = data
    scores = model(q, d).masked_fill(~real, -1e9)
    model.train()
    discount = 1 / torch.log2(torch.arange(k) + 2.0)
    gain = 2 ** grades - 1
    top = (gain.gather(1, scores.topk(k).indices) * discount).sum(1)
    best = (gain.topk(k).values * discount).sum(1)
    return (top[best > 0] / best[best > 0]).mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    world = rng.standard_normal((QUERY_DIM, DOC_DIM)) / np.sqrt(QUERY_DIM) * 1.2
    train, test = make_queries(2000, rng, world), make_queries(400, rng, world)
    if CASE != "case_c":
        standardise(train, test)
    model = Ranker()
    parameters = model.head.parameters() if CASE == "case_d" else model.parameters()
    if CASE == "variant_x":
        optimizer = torch.optim.Adamax(parameters, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=50)
    else:
        optimizer = torch.optim.Adam(parameters, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 300, 0.3)
    for step in range(500):
        q, d, grades, real = batch(train, rng.integers(0, 2000, 64), rng)
        scores = model(q, d)
        loss = pairwise(scores, grades, real) if CASE == "variant_x" else listwise(scores, grades, real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} held-out ndcg {ndcg(model, test):.4f}")
    print(f"final ndcg {ndcg(model, test):.4f}")


if __name__ == "__main__":
    main()
