import torch
import torch.nn as nn
import torch.nn.functional as F


class GCN(nn.Module):
    def __init__(self, d, h, k):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, h, bias=False), nn.Linear(h, k, bias=False)
        self.b1, self.b2 = nn.Parameter(torch.zeros(h)), nn.Parameter(torch.zeros(k))

    def forward(self, x, a):
        x = F.dropout(x, 0.5, self.training)
        x = F.relu(torch.sparse.mm(a, self.w1(x)) + self.b1)
        x = F.dropout(x, 0.5, self.training)
        return torch.sparse.mm(a, self.w2(x)) + self.b2


def graph(n=900, k=3, d=120):
    y = torch.randint(0, k, (n,))
    p = torch.where(y[:, None] == y[None], 0.02, 0.003)
    a = torch.triu((torch.rand(n, n) < p).float(), 1)
    a = a + a.T + torch.eye(n)
    s = a.sum(1).rsqrt()
    words = torch.rand(k, d) ** 3
    x = (torch.rand(n, d) < 0.05 + 0.12 * words[y]).float()
    return x / x.sum(1, keepdim=True).clamp(min=1), (s[:, None] * a * s[None]).to_sparse(), y


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, a, y = graph()
    train = torch.cat([torch.where(y == c)[0][:20] for c in range(3)])
    test = torch.ones(len(y), dtype=torch.bool)
    test[train] = False
    net = GCN(120, 16, 3)
    opt = torch.optim.Adam([{"params": net.w1.parameters(), "weight_decay": 5e-3},
                            {"params": list(net.w2.parameters()) + [net.b1, net.b2], "weight_decay": 0}], lr=0.02)
    for ep in range(1, 201):
        net.train()
        loss = F.cross_entropy(net(x, a)[train], y[train])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if ep % 40 == 0:
            net.eval()
            with torch.no_grad():
                p = net(x, a).argmax(1)
            acc = (p == y)[test].float().mean().item()
            print(f"epoch {ep} loss {loss.item():.4f} train {(p == y)[train].float().mean():.3f} test {acc:.4f}")
    print("final test acc", round(acc, 4))


main()
