"""Regression of a molecule-like graph property with an edge-typed isomorphism network."""
import os
import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
ATOMS, BONDS = 5, 3
CHARGE = [0.0, 0.9, -0.7, 0.4, -1.2]


def molecule(rng):
    """A random tree with some rings; the property sums interactions over bonds and over two-bond paths."""
    n = rng.randint(6, 14)
    atoms = [rng.randrange(ATOMS) for _ in range(n)]
    bonds = [(rng.randrange(max(0, i - 3), i), i, rng.randrange(BONDS)) for i in range(1, n)]
    known = {(i, j) for i, j, _ in bonds}
    for _ in range(2):
        i, j = sorted(rng.sample(range(n), 2))
        if (i, j) not in known:
            known.add((i, j))
            bonds.append((i, j, rng.randrange(BONDS)))
    nbr = [[] for _ in range(n)]
    value = 20.0
    for i, j, b in bonds:
        value += 2 * (b + 1) * CHARGE[atoms[i]] * CHARGE[atoms[j]]
        nbr[i].append(j)
        nbr[j].append(i)
    for i in range(n):
        value += 4 * abs(sum(CHARGE[atoms[j]] for j in nbr[i])) + 2.0 * (atoms[i] == 1)
    return atoms, bonds, value


def collate(mols):
    atoms, src, dst, kind, graph, offset = [], [], [], [], [], 0
    for g, (a, bonds, _) in enumerate(mols):
        atoms += a
        graph += [g] * len(a)
        for i, j, b in bonds:
            src.append(i + offset)
            dst.append(j + offset)
            kind.append(b)
            if CASE != "f2":
                src.append(j + offset)
                dst.append(i + offset)
                kind.append(b)
        if CASE != "f1":
            offset += len(a)
    y = torch.tensor([v for _, _, v in mols])
    return tuple(map(torch.tensor, (atoms, src, dst, kind, graph))), y


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bond = nn.Embedding(BONDS, dim)
        self.pair = nn.Linear(dim, dim)
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))


    def forward(self, h, src, dst, kind):
        msg = F.relu(self.pair(h[src]) + h[dst] + self.bond(kind))
        agg = torch.zeros_like(h).index_add_(0, dst, msg)
        return h + self.mlp((1 + self.eps) * h + agg)


class GIN(nn.Module):
    def __init__(self, dim=40, depth=2):
        super().__init__()
        self.atom = nn.Embedding(ATOMS, dim)
        layers = [Layer(dim) for _ in range(depth)]
        self.layers = layers if CASE == "f4" else nn.ModuleList(layers)
        self.read = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

        self.aux = nn.Linear(dim, ATOMS)

    def forward(self, atoms, src, dst, kind, graph):
        h = self.atom(atoms)
        for layer in self.layers:
            h = layer(h, src, dst, kind)
        size = int(graph.max()) + 1
        pooled = torch.zeros(size, h.shape[1]).index_add(0, graph, h) / 10
        return self.read(pooled).squeeze(1), self.aux(h)


@torch.no_grad()
def mae(model, batches, mean, std):
    model.eval()
    total = n = 0
    for inputs, y in batches:
        pred = model(*inputs)[0]
        if CASE != "f3":
            pred = pred * std + mean
        total += (pred - y).abs().sum().item()
        n += len(y)
    model.train()
    return total / n


def main():
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    mols = [molecule(rng) for _ in range(2300)]
    train, test = mols[:2000], mols[2000:]
    test_batches = [collate(test[i:i + 100]) for i in range(0, 300, 100)]
    values = torch.tensor([m[2] for m in train])
    mean, std = values.mean(), values.std()
    print("mean predictor MAE %.3f" % torch.cat([(y - mean).abs() for _, y in test_batches]).mean())
    model = GIN()
    opt = torch.optim.RAdam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=500)
    for step in range(500):
        inputs, y = collate(rng.sample(train, 32))
        pred, atom_logits = model(*inputs)
        loss = F.smooth_l1_loss(pred, (y - mean) / std)
        if CASE == "variant_x":                                # the nodes also name their own atom
            loss = loss + 0.1 * F.cross_entropy(atom_logits, inputs[0])
        opt.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 125 == 124:
            print("step %d  loss %.4f  held-out MAE %.3f" % (step + 1, loss.item(), mae(model, test_batches, mean, std)))
    print("final held-out MAE %.4f" % mae(model, test_batches, mean, std))


if __name__ == "__main__":
    main()
