"""SimCLR on multichannel signals: low temperature, layer-wise adaptive rates, projection head thrown away."""
import torch
import torch.nn as nn
import torch.nn.functional as F

K, LEN = 6, 32
FREQ = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def signals(n, g):
    y = torch.randint(K, (n,), generator=g)
    t = torch.linspace(0, 6.28, LEN)
    ph = torch.rand(n, 1, generator=g) * 6.28
    return torch.sin(FREQ[y][:, None] * t + ph), y


def view(x, g):
    n = len(x)
    drift = torch.randn(n, 1, generator=g) * torch.linspace(-1, 1, LEN) + torch.randn(n, 1, generator=g)
    x = x * (0.6 + 0.8 * torch.rand(n, 1, generator=g)) + 0.8 * drift + 0.3 * torch.randn(n, LEN, generator=g)
    shift = torch.randint(LEN, (n, 1), generator=g)
    return x.gather(1, (torch.arange(LEN)[None] + shift) % LEN)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 24, 7, padding=3, padding_mode="circular"), nn.ReLU(),
                                     nn.Conv1d(24, 48, 5, stride=2, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 24, bias=False))

    def forward(self, x):
        h = self.encoder(x.unsqueeze(1))
        return h, F.normalize(self.head(h), dim=-1)


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, wd=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, wd=wd, trust=trust))

    @torch.no_grad()
    def step(self):
        for gr in self.param_groups:
            for p in gr["params"]:
                d = p.grad
                if p.dim() > 1:
                    d = d + gr["wd"] * p
                    d = d * (gr["trust"] * p.norm() / (d.norm() + 1e-8))
                buf = self.state[p].setdefault("mu", torch.zeros_like(p))
                buf.mul_(gr["momentum"]).add_(d)
                p.add_(buf, alpha=-gr["lr"])


def ntxent(z, tau):
    n = len(z) // 2
    s = z @ z.T / tau
    s = s.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(s, torch.arange(2 * n).roll(n))


def knn(h, y):
    h = F.normalize(h, dim=-1)
    s = (h @ h.T).fill_diagonal_(-2)
    return (y[s.topk(5).indices].mode(-1).values == y).float().mean().item()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    net = Net()
    opt = LARS(net.parameters(), lr=1.0)
    xt, yt = signals(500, g)
    xt = view(xt, g)
    print("before", knn(net(xt)[0].detach(), yt))
    for step in range(220):
        for gr in opt.param_groups:
            gr["lr"] = min(1.0, (step + 1) / 20)
        x, _ = signals(64, g)
        _, z = net(torch.cat([view(x, g), view(x, g)]))
        loss = ntxent(z, 0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 55 == 0:
            print(step, loss.item())
    net.eval()
    with torch.no_grad():
        return knn(net(xt)[0], yt)


if __name__ == "__main__":
    print(main())
