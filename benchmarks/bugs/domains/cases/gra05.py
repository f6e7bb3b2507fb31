"""Reachability by a weight-shared gated message-passing network (frozen random node codes, masked loss)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

N, HOPS, ITERS = 32, 3, 4


class Reach(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.codes = nn.Embedding(N, 4)
        self.codes.weight.requires_grad_(False)
        self.inp = nn.Linear(5, d)
        self.msg = nn.Linear(d, d)
        self.cell = nn.GRUCell(d, d)
        self.out = nn.Linear(d, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, -0.5)

    def forward(self, adj, flag):
        B = len(adj)
        x = torch.cat([flag.unsqueeze(-1), self.codes.weight.expand(B, -1, -1)], -1)
        h = torch.tanh(self.inp(x))
        for _ in range(ITERS):
            m = adj @ F.relu(self.msg(h))
            h = self.cell(m.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.out(h).squeeze(-1)


def batch(n, g):
    a = torch.triu((torch.rand(n, N, N, generator=g) < 0.05), 1)
    a = (a | a.transpose(1, 2)).float()
    start = torch.randint(N, (n,), generator=g)
    flag = F.one_hot(start, N).float()
    r = flag.clone()
    for _ in range(HOPS):
        r = ((r + torch.bmm(a, r.unsqueeze(-1)).squeeze(-1)) > 0).float()
    size = torch.randint(20, N + 1, (n, 1), generator=g)
    mask = (torch.arange(N)[None] < size).float()
    return a, flag, r, mask


def main():
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    net = Reach()
    opt = torch.optim.RAdam([p for p in net.parameters() if p.requires_grad], lr=8e-3)
    for step in range(220):
        a, f, y, m = batch(16, g)
        bce = F.binary_cross_entropy_with_logits(net(a, f), y, reduction="none")
        loss = (bce * m).sum() / m.sum()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        opt.step()
        if step % 40 == 0:
            print(step, loss.item())
    net.eval()
    with torch.no_grad():
        a, f, y, m = batch(100, g)
        p = (net(a, f) > 0).float()
        return ((p == y).float() * m).sum().item() / m.sum().item()


if __name__ == "__main__":
    print(main())
