"""Influence on a directed follower graph: a node's activity follows from those it receives messages from."""
import torch
from torch import nn
import torch.nn.functional as F


def make_graph(seed, n=300, deg=6):
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(n, (n * deg,), generator=g)
    dst = torch.randint(n, (n * deg,), generator=g)
    x = torch.randn(n, 6, generator=g)
    w = torch.sigmoid(x[:, 0])
    msg = w[src] * torch.tanh(x[src, 1] + x[src, 2])
    s = torch.zeros(n).index_add(0, dst, msg)
    y = s + 0.3 * x[:, 3] * torch.sigmoid(s)
    return {"x": x, "edge_index": torch.stack([src, dst]), "y": y}


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, 48), nn.SiLU(), nn.Linear(48, dim))
        self.update = nn.Sequential(nn.Linear(2 * dim, 48), nn.SiLU(), nn.Linear(48, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, edge_index):
        dst, src = edge_index
        m = self.message(torch.cat([h[src], h[dst]], -1))
        agg = torch.zeros_like(h).index_add_(0, dst, m)
        return h + self.update(torch.cat([self.norm(h), agg], -1))


class InfluenceNet(nn.Module):
    def __init__(self, d_in=6, dim=32, layers=1):
        super().__init__()
        self.encode = nn.Linear(d_in, dim)
        self.layers = nn.ModuleList([MessageLayer(dim) for _ in range(layers)])
        self.decode = nn.Linear(dim, 1)

    def forward(self, x, edge_index):
        h = self.encode(x)
        for layer in self.layers:
            h = layer(h, edge_index)
        return self.decode(h).squeeze(-1)


def main():
    torch.manual_seed(0)
    train = [make_graph(s) for s in range(40)]
    test = [make_graph(s) for s in range(100, 110)]
    net = InfluenceNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    step = 0
    for epoch in range(6):
        for gr in train:
            pred = net(gr["x"], gr["edge_index"])
            loss = F.mse_loss(pred, gr["y"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        print(f"epoch {epoch} mse {loss.item():.4f}")
    net.eval()
    with torch.no_grad():
        p = torch.cat([net(t["x"], t["edge_index"]) for t in test])
        y = torch.cat([t["y"] for t in test])
    return (1 - ((p - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()).item()


if __name__ == "__main__":
    print(main())
