"""Predict the energy of small molecule-like graphs of different sizes."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "edges_not_offset",
    "energy_unscaled",
    "schedule_per_batch",
    "pooled_values_detached",
    "wrong_pooling_index",
    "variant_frozen_accumulation",
)
KINDS, MOST = 6, 14
STEPS, BATCH, PER_EPOCH = 300, 32, 30
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class Molecules:
    """Random graphs; the energy sums over the bonds and atoms."""

    def __init__(self) -> None:
        table = torch.randn(KINDS, KINDS)
        self.bond, self.atom = table + table.T, torch.randn(KINDS)

    def batch(self, count: int, offset: bool = True) -> Batch:
        """Return atom kinds, edges in both directions, each atom's graph, and the energies."""
        kinds, edges, graphs, energies, start = [], [], [], [], 0
        for graph in range(count):
            atoms = int(torch.randint(5, MOST + 1, (1,)))
            kind = torch.randint(0, KINDS, (atoms,))
            pairs = torch.rand(atoms, atoms).triu(1) > 1 - 2.2 / atoms
            a, b = pairs.nonzero().T
            energy = self.atom[kind].sum() + 0.7 * self.bond[kind[a], kind[b]].sum()
            energies.append(-400.0 + 12.0 * energy)
            shift = start if offset else 0
            edges.append(torch.stack([torch.cat([a, b]), torch.cat([b, a])]) + shift)
            kinds.append(kind)
            graphs.append(torch.full((atoms,), graph))
            start += atoms
        return torch.cat(kinds), torch.cat(edges, 1), torch.cat(graphs), torch.stack(energies)


class EnergyNet(nn.Module):
    """Embedding, two rounds of edge messages, sum over the atoms, and an MLP."""

    def __init__(self, case: str, size: int = 48) -> None:
        super().__init__()
        self.case = case
        self.embedding = nn.Embedding(KINDS, size)
        self.messages = nn.ModuleList(nn.Linear(2 * size, size) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(2 * size, size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.readout = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, kinds: Tensor, edges: Tensor, graphs: Tensor, count: int) -> Tensor:
        x = self.embedding(kinds)
        source, target = edges
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = torch.relu(message(torch.cat([x[source], x[target]], 1)))
            got = torch.zeros_like(x).index_add(0, target, sent)
            x = norm(x + torch.relu(update(torch.cat([x, got], 1))))
        if self.case == "wrong_pooling_index":
            graphs = torch.arange(len(x)) % count
        pooled = x.new_zeros(count, x.shape[1]).index_add(0, graphs, x) / MOST
        if self.case == "pooled_values_detached":
            pooled = pooled.detach()
        return self.readout(pooled)[:, 0]


@torch.no_grad()
def r2(model: EnergyNet, batch: Batch, mean: Tensor, spread: Tensor) -> float:
    """The share of the variance that is explained, on new graphs."""
    model.eval()
    energies = batch[3]
    predicted = model(*batch[:3], len(energies)) * spread + mean
    return float(1 - (predicted - energies).square().mean() / energies.var())


def main(case: str) -> None:
    torch.manual_seed(0)
    data = Molecules()
    offset = case != "edges_not_offset"
    batches = [data.batch(BATCH, offset) for _ in range(PER_EPOCH)]
    test = data.batch(300, offset)
    energies = torch.cat([batch[3] for batch in batches])
    mean, spread = energies.mean(), energies.std()
    if case == "energy_unscaled":
        mean, spread = torch.tensor(0.0), torch.tensor(1.0)
    model = EnergyNet(case)
    special = case == "variant_frozen_accumulation"
    if special:
        model.embedding.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)
    for step in range(STEPS):
        kinds, edges, graphs, target = batches[step % PER_EPOCH]
        predicted = model(kinds, edges, graphs, BATCH)
        loss = F.mse_loss(predicted, (target - mean) / spread)
        if special:
            (loss / 2).backward()
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if case == "schedule_per_batch" or (step + 1) % PER_EPOCH == 0:
            scheduler.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"quality (R2): {r2(model, test, mean, spread):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
