"""Node classification with a graph convolution network on a synthetic citation graph."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
NODES, CLASSES, FEATS = 1200, 5, 40


def make_graph(rng):
    y = rng.integers(0, CLASSES, NODES)
    centers = rng.normal(size=(CLASSES, FEATS))
    x = 0.28 * centers[y] + rng.normal(size=(NODES, FEATS))
    same = y[:, None] == y[None]
    prob = np.where(same, 0.024, 0.0018)
    upper = np.triu(rng.random((NODES, NODES)) < prob, 1)
    src, dst = np.nonzero(upper)
    edges = np.stack([np.concatenate([src, dst]), np.concatenate([dst, src])])
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), torch.from_numpy(edges)


def shuffle_nodes(x, y, edges, rng):
    """Renumber the nodes so that the order of the file says nothing."""
    perm = torch.from_numpy(rng.permutation(NODES))
    new_id = torch.empty_like(perm)
    new_id[perm] = torch.arange(NODES)
    if CASE == "b2":
        return x[perm], y[perm], edges
    return x[perm], y[perm], new_id[edges]


class GraphConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.own = nn.Linear(cin, cout)
        self.neigh = nn.Linear(cin, cout, bias=False)

    def forward(self, h, edges):
        src, dst = edges
        total = torch.zeros_like(h)
        total.index_add_(0, src if CASE == "b1" else dst, h[src])
        degree = torch.zeros(len(h)).index_add_(0, dst, torch.ones(len(dst))).clamp(min=1)
        return self.own(h) + self.neigh(total / degree[:, None])


class GCN(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.c1 = GraphConv(FEATS, hidden)
        self.c2 = GraphConv(hidden, hidden)
        self.out = nn.Linear(2 * hidden if CASE == "variant_x" else hidden, CLASSES)

    def forward(self, x, edges):
        h1 = F.dropout(torch.relu(self.c1(x, edges)), 0.4, self.training)
        h2 = F.dropout(torch.relu(self.c2(h1, edges)), 0.4, self.training)
        if CASE == "variant_x":
            h2 = torch.cat([h1, h2], 1)
        return self.out(h2)


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    x, y, edges = shuffle_nodes(*make_graph(rng), rng)
    order = torch.from_numpy(rng.permutation(NODES))
    train, test = order[:400], order[600:]
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=2e-3)
    steps = 250
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) if CASE == "variant_x" else None

    @torch.no_grad()
    def accuracy(idx):
        model.eval()
        hit = (model(x, edges)[idx].argmax(1) == y[idx]).float().mean().item()
        model.train()
        return hit

    for step in range(steps):
        step_edges = edges
        if CASE == "variant_x":           # drop a fifth of the edges in each step
            step_edges = edges[:, torch.rand(edges.shape[1]) > 0.2]
        logits = model(x, step_edges)
        logp = F.log_softmax(logits, dim=0 if CASE == "b4" else 1)
        if CASE == "b3":
            loss = F.nll_loss(logp[train], y[:len(train)])
        else:
            loss = F.nll_loss(logp[train], y[train])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if sched is not None:
            sched.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} train acc {accuracy(train):.4f} test acc {accuracy(test):.4f}")
    print(f"quality {accuracy(test):.4f}")


if __name__ == "__main__":
    main()
