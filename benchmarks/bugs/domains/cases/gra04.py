"""Energy regression on small molecule-like graphs, batched as one disconnected graph."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Graph:
    z: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor


PAIR = torch.randn(5, 5, generator=torch.Generator().manual_seed(9))
PAIR = (PAIR + PAIR.T) / 2


def random_graph(g):
    n = int(torch.randint(6, 14, (1,), generator=g))
    z = torch.randint(5, (n,), generator=g)
    tree_src = torch.arange(1, n)
    tree_dst = torch.tensor([int(torch.randint(i, (1,), generator=g)) for i in range(1, n)])
    e = torch.stack([torch.cat([tree_src, tree_dst]), torch.cat([tree_dst, tree_src])])
    y = PAIR[z[tree_src], z[tree_dst]].mean() * 3
    return Graph(z, e, y)


def collate(graphs):
    z = torch.cat([gr.z for gr in graphs])
    edges = torch.cat([gr.edge_index for gr in graphs], dim=1)
    batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor([len(gr.z) for gr in graphs]))
    y = torch.stack([gr.y for gr in graphs])
    return z, edges, batch, y


class GINConv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, h, edges):
        agg = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return self.mlp((1 + self.eps) * h + agg)


class EnergyNet(nn.Module):
    def __init__(self, d=32, layers=2):
        super().__init__()
        self.atom = nn.Embedding(5, d)
        self.convs = nn.ModuleList(GINConv(d) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.readout = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1))

    def forward(self, z, edges, batch, n_graphs):
        h = self.atom(z)
        for conv, norm in zip(self.convs, self.norms):
            h = h + torch.relu(norm(conv(h, edges)))
        pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, batch, h)
        count = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
        return self.readout(pooled / count).squeeze(1)


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(2)
    data = [random_graph(g) for _ in range(1300)]
    loader = torch.utils.data.DataLoader(data[:1000], batch_size=40, shuffle=True, collate_fn=collate)
    test = torch.utils.data.DataLoader(data[1000:], batch_size=40, collate_fn=collate)
    model = EnergyNet()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for epoch in range(10):
        model.train()
        for z, edges, batch, y in loader:
            loss = F.mse_loss(model(z, edges, batch, len(y)), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        print(f"epoch {epoch} mse {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        errs = torch.cat([(model(z, e, b, len(y)) - y).abs() for z, e, b, y in test])
    return errs.mean().item()


if __name__ == "__main__":
    print(main())
