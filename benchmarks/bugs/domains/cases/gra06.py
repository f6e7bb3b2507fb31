import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        bound = math.sqrt(6 / (in_features + out_features))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x, adj):
        return adj @ (x @ self.weight) + self.bias


class DeepGCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, depth=16, dropout=0.1):
        super().__init__()
        self.inp = nn.Linear(nfeat, nhid)
        self.convs = nn.ModuleList(GraphConvolution(nhid, nhid) for _ in range(depth))
        self.out = nn.Linear(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        h = F.relu(self.inp(x))
        for conv in self.convs:
            h = F.dropout(h, self.dropout, training=self.training)
            h = F.relu(conv(h, adj))
        return self.out(h)


def build(n=400, k=4, seed=4):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n,), generator=g)
    p = torch.where(y[:, None] == y[None], 0.05, 0.012)
    a = torch.triu(torch.rand(n, n, generator=g) < p, 1)
    a = (a | a.T).float() + torch.eye(n)
    d = a.sum(1).pow(-0.5)
    x = torch.randn(k, 24, generator=g)[y] + 1.2 * torch.randn(n, 24, generator=g)
    return x, d[:, None] * a * d[None], y


def main():
    torch.manual_seed(14)
    x, adj, y = build()
    idx = torch.randperm(len(y))
    idx_train, idx_test = idx[:150], idx[200:]
    model = DeepGCN(24, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for epoch in range(200):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss_train = F.cross_entropy(output[idx_train], y[idx_train])
        loss_train.backward()
        optimizer.step()
        if epoch % 40 == 0:
            acc = (output[idx_train].argmax(1) == y[idx_train]).float().mean().item()
            print(f"Epoch {epoch:04d} loss {loss_train.item():.4f} acc {acc:.3f}")
    model.eval()
    with torch.no_grad():
        out = model(x, adj)
    return (out[idx_test].argmax(1) == y[idx_test]).float().mean().item()


if __name__ == "__main__":
    print(main())
