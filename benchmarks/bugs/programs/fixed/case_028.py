import torch
import torch.nn as nn
import torch.nn.functional as F


class GATLayer(nn.Module):
    def __init__(self, d_in, d_out, heads):
        super().__init__()
        self.h, self.d = heads, d_out
        self.W = nn.Linear(d_in, heads * d_out, bias=False)
        self.a_src = nn.Parameter(torch.randn(heads, d_out) * 0.1)
        self.a_dst = nn.Parameter(torch.randn(heads, d_out) * 0.1)

    def forward(self, x, adj):
        n = x.size(0)
        z = self.W(x).view(n, self.h, self.d)
        s = (z * self.a_src).sum(-1)
        t = (z * self.a_dst).sum(-1)
        e = F.leaky_relu(s.unsqueeze(1) + t.unsqueeze(0), 0.2)
        e = e.masked_fill(adj.unsqueeze(-1) == 0, float("-inf"))
        alpha = torch.softmax(e, dim=1)
        alpha = F.dropout(alpha, 0.2, self.training)
        return torch.einsum("ijh,jhd->ihd", alpha, z).reshape(n, self.h * self.d)


class GAT(nn.Module):
    def __init__(self, d_in, hid, k, heads=4):
        super().__init__()
        self.g1 = GATLayer(d_in, hid, heads)
        self.g2 = GATLayer(hid * heads, k, 1)

    def forward(self, x, adj):
        x = F.elu(self.g1(x, adj))
        return self.g2(F.dropout(x, 0.3, self.training), adj)


def sbm(n=240, k=4, p_in=0.12, p_out=0.012, d=16):
    y = torch.arange(n) % k
    same = y[:, None] == y[None, :]
    prob = torch.where(same, torch.tensor(p_in), torch.tensor(p_out))
    up = torch.triu((torch.rand(n, n) < prob).float(), 1)
    adj = up + up.t() + torch.eye(n)
    centers = torch.randn(k, d)
    x = centers[y] * 0.5 + torch.randn(n, d)
    return x, adj, y


torch.manual_seed(0)
torch.set_num_threads(1)
x, adj, y = sbm()
perm = torch.randperm(len(y))
train, test = perm[:80], perm[80:]
model = GAT(16, 8, 4)
opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(1, 151):
    model.train()
    loss = F.cross_entropy(model(x, adj)[train], y[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 25 == 0:
        model.eval()
        with torch.no_grad():
            acc = (model(x, adj)[test].argmax(1) == y[test]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.4f} test acc {acc:.4f}")
print("final test acc", round(acc, 4))
