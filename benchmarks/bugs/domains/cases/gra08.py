"""Skip-gram node embeddings from random walks: sparse gradients, plain SGD with a very large learning rate."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def graph(n=240, k=6, seed=1):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    p = torch.where(y[:, None] == y[None], 0.2, 0.01)
    a = torch.triu(torch.rand(n, n, generator=g) < p, 1)
    return (a | a.T).float() + 1e-6, y


class SkipGram(nn.Module):
    def __init__(self, n, d=32):
        super().__init__()
        self.centre = nn.Embedding(n, d, sparse=True)
        self.context = nn.Embedding(n, d, sparse=True)
        nn.init.uniform_(self.centre.weight, -0.5 / d, 0.5 / d)
        nn.init.zeros_(self.context.weight)

    def forward(self, u, v, neg):
        cu = self.centre(u)
        pos = (cu * self.context(v)).sum(-1)
        negs = torch.bmm(self.context(neg), cu.unsqueeze(-1)).squeeze(-1)
        return -(F.logsigmoid(pos) + F.logsigmoid(-negs).sum(-1)).mean()


def walk_pairs(a, g, starts=120, length=6, window=3):
    cur = torch.randint(len(a), (starts,), generator=g)
    path = [cur]
    for _ in range(length):
        cur = torch.multinomial(a[cur], 1, generator=g).squeeze(1)
        path.append(cur)
    path = torch.stack(path, 1)
    us, vs = [], []
    for w in range(1, window + 1):
        us.append(path[:, :-w].flatten())
        vs.append(path[:, w:].flatten())
    return torch.cat(us), torch.cat(vs)


def knn_purity(z, y):
    z = F.normalize(z, dim=-1)
    s = z @ z.T
    s.fill_diagonal_(-2)
    return (y[s.topk(10).indices] == y[:, None]).float().mean().item()


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(2)
    a, y = graph()
    model = SkipGram(len(a))
    opt = torch.optim.SGD(model.parameters(), lr=40.0)
    steps = 250
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
    print("start", knn_purity(model.centre.weight.detach(), y))
    for step in range(steps):
        u, v = walk_pairs(a, g)
        neg = torch.randint(len(a), (len(u), 4), generator=g)
        loss = model(u, v, neg)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 50 == 0:
            print(step, loss.item())
    return knn_purity(model.centre.weight.detach(), y)


if __name__ == "__main__":
    print(main())
