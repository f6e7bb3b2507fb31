import torch
import torch.nn as nn
import torch.nn.functional as F


def build_graph(seed=0):
    g = torch.Generator().manual_seed(seed)
    n, k = 400, 5
    y = torch.randint(0, k, (n,), generator=g)
    src, dst = [], []
    for i in range(n):
        same = torch.where(y == y[i])[0]
        for j in same[torch.randint(len(same), (4,), generator=g)].tolist():
            src.append(i)
            dst.append(j)
        src.append(i)
        dst.append(int(torch.randint(n, (1,), generator=g)))
    e = torch.tensor([src + dst, dst + src])
    x = F.one_hot(y, k).float() + 0.9 * torch.randn(n, k, generator=g)
    return x, e, y


class SAGE(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_lin, self.nb_lin = nn.Linear(i, o), nn.Linear(i, o)

    def forward(self, x, e):
        agg = torch.zeros_like(x).index_add_(0, e[1], x[e[0]])
        deg = torch.zeros(len(x)).index_add_(0, e[1], torch.ones(e.size(1))).clamp(min=1)
        return self.self_lin(x) + self.nb_lin(agg / deg.unsqueeze(1))


class Net(nn.Module):
    def __init__(self, d, h, k):
        super().__init__()
        self.s1, self.s2 = SAGE(d, h), SAGE(h, k)

    def forward(self, x, e):
        return self.s2(F.dropout(F.relu(self.s1(x, e)), 0.2, self.training), e)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, edges, labels = build_graph()
    idx = torch.randperm(len(labels))
    train_idx, val_idx = idx[:200], idx[200:]
    net = Net(5, 32, 5)
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-3)
    for epoch in range(200):
        net.train()
        logits = net(x, edges)
        loss = F.cross_entropy(logits[train_idx], labels[train_idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if epoch % 40 == 39:
            net.eval()
            with torch.no_grad():
                pred = net(x, edges).argmax(1)
                acc = (pred[val_idx] == labels[val_idx]).float().mean().item()
            print(f"epoch {epoch + 1} loss {loss.item():.4f} val acc {acc:.4f}")
    print("final val acc", round(acc, 4))
