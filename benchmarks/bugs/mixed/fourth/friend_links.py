"""Link prediction in a friendship graph with a GraphSAGE encoder and a bilinear decoder."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

NODES, GROUPS = 500, 10


def make_graph(rng):
    """Planted groups; a node's features show its group only faintly."""
    group = rng.integers(0, GROUPS, NODES)
    probability = np.where(group[:, None] == group[None], 0.25, 0.002)
    upper = np.triu(rng.random((NODES, NODES)) < probability, 1)
    features = np.eye(GROUPS)[group] + 0.9 * rng.standard_normal((NODES, GROUPS))
    edges = rng.permutation(np.argwhere(upper))
    held = len(edges) // 6
    candidates = rng.integers(0, NODES, (4 * held, 2))
    keep = ~(upper | upper.T)[candidates[:, 0], candidates[:, 1]] & (candidates[:, 0] != candidates[:, 1])
    return (torch.tensor(features, dtype=torch.float32), torch.tensor(edges[held:].T),
            torch.tensor(edges[:held].T), torch.tensor(candidates[keep][:held].T))


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.near = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, source, target):
        messages = x[target] if CASE == "case_a" else x[source]
        total = torch.zeros_like(x).index_add_(0, target, messages)
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return self.own(x) + self.near(total / degree.unsqueeze(1))


class LinkModel(nn.Module):
    def __init__(self, inputs, hidden=32):
        super().__init__()
        self.first, self.second = SageLayer(inputs, hidden), SageLayer(hidden, hidden)
        self.weight = nn.Parameter(torch.eye(hidden) + 0.05 * torch.randn(hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(1))

    def encode(self, x, edges):
        source, target = torch.cat([edges, edges.flip(0)], 1)
        x = F.dropout(F.leaky_relu(self.first(x, source, target)), 0.2, self.training)
        return self.second(x, source, target)

    def forward(self, x, edges, pairs):
        z = F.normalize(self.encode(x, edges), dim=-1) * 3
        if CASE == "case_c":
            z = z.detach()
        symmetric = (self.weight + self.weight.T) / 2
        return torch.einsum("pi,ij,pj->p", z[pairs[0]], symmetric, z[pairs[1]]) + self.bias


def negative_pairs(count):
    if CASE == "case_b":
        nodes = torch.randint(NODES, (count,))
        return torch.stack([nodes, nodes])
    return torch.randint(NODES, (2, count))


@torch.no_grad()
def auc(model, x, edges, positive, negative):
    model.eval()
    p, n = model(x, edges, positive), model(x, edges, negative)
    model.train()
    return (p[:, None] > n[None]).float().mean().item()


def main():
    torch.manual_seed(SEED)
    x, edges, positive, negative = make_graph(np.random.default_rng(SEED))
    model = LinkModel(x.shape[1])
    if CASE == "variant_x":
        model.first.requires_grad_(False)
        optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.05)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(250):
        shuffled = edges[:, torch.randperm(edges.shape[1])]
        pairs, context = shuffled[:, :500], shuffled[:, 500:]
        if CASE == "variant_x":
            context = context[:, torch.rand(context.shape[1]) < 0.8]
        scores = model(x, context, torch.cat([pairs, negative_pairs(500)], 1))
        if CASE == "variant_x":
            loss = F.margin_ranking_loss(scores[:500], scores[500:], torch.ones(500), margin=2.0)
        else:
            labels = torch.cat([torch.ones(500), torch.zeros(500)])
            if CASE == "case_d":
                labels = torch.cat([torch.zeros(500), torch.ones(500)])
            loss = F.binary_cross_entropy_with_logits(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} held-out auc {auc(model, x, edges, positive, negative):.4f}")
    print(f"final auc {auc(model, x, edges, positive, negative):.4f}")


if __name__ == "__main__":
    main()
