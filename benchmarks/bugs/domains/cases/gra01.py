"""Node classification with a graph attention network on a stochastic block model."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def sbm(n=360, k=4, p_in=0.07, p_out=0.008, noise=1.6, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(k, (n,), generator=g)
    same = y[:, None] == y[None]
    prob = torch.where(same, p_in, p_out)
    adj = torch.rand(n, n, generator=g) < prob
    adj = torch.triu(adj, 1)
    adj = adj | adj.T
    adj.fill_diagonal_(True)
    centres = torch.randn(k, 16, generator=g)
    x = centres[y] + noise * torch.randn(n, 16, generator=g)
    return x, adj.nonzero().T, y


class GATLayer(nn.Module):
    def __init__(self, d_in, d_out, heads, concat=True):
        super().__init__()
        self.heads, self.d_out, self.concat = heads, d_out, concat
        self.lin = nn.Linear(d_in, heads * d_out, bias=False)
        self.att_src = nn.Parameter(torch.empty(heads, d_out))
        self.att_dst = nn.Parameter(torch.empty(heads, d_out))
        self.bias = nn.Parameter(torch.zeros(heads * d_out if concat else d_out))
        nn.init.xavier_uniform_(self.lin.weight)
        nn.init.xavier_uniform_(self.att_src)
        nn.init.xavier_uniform_(self.att_dst)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.d_out)
        e = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        e = F.leaky_relu(e, 0.2)
        alpha = F.softmax(e, dim=0)
        out = torch.zeros_like(h).index_add(0, dst, alpha.unsqueeze(-1) * h[src])
        out = out.flatten(1) if self.concat else out.mean(1)
        return out + self.bias


class GAT(nn.Module):
    def __init__(self, d_in, n_cls, hid=8, heads=4):
        super().__init__()
        self.conv1 = GATLayer(d_in, hid, heads)
        self.conv2 = GATLayer(hid * heads, n_cls, heads, concat=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, edge_index):
        x = F.elu(self.conv1(self.dropout(x), edge_index))
        return self.conv2(self.dropout(x), edge_index)


def main():
    torch.manual_seed(1)
    x, edge_index, y = sbm()
    perm = torch.randperm(len(y))
    tr, te = perm[:120], perm[180:]
    model = GAT(16, 4)
    opt = torch.optim.Adam(model.parameters(), lr=8e-3, weight_decay=5e-4)
    for epoch in range(200):
        model.train()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[tr], y[tr])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 50 == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        pred = model(x, edge_index).argmax(-1)
    return (pred[te] == y[te]).float().mean().item()


if __name__ == "__main__":
    print(main())
