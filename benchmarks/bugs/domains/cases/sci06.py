"""Deep kernel regression: a learned feature space with a Matern-1/2 kernel and random support sets."""
import torch
import torch.nn as nn


class FeatureNet(nn.Module):
    def __init__(self, d_in=5, d_out=3, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, d_out))

    def forward(self, x):
        return self.net(x)


class DeepKernelRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = FeatureNet()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(()))

    def kernel(self, a, b):
        za, zb = self.features(torch.cat([a, b])).split([len(a), len(b)])
        d2 = (za[:, None] - zb[None]).pow(2).sum(-1)
        return torch.exp(-torch.sqrt(d2) * self.log_scale.exp())

    def forward(self, query, support_x, support_y):
        k = self.kernel(query, support_x)
        return self.bias + (k @ (support_y - self.bias)) / (k.sum(-1) + 1e-6)


def measurements(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2].abs() + 0.05 * torch.randn(n, generator=g)
    return x, y


def main():
    torch.manual_seed(5)
    x, y = measurements(40000, 1)
    xt, yt = measurements(500, 2)
    model = DeepKernelRegressor()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(6)
    for step in range(220):
        q = torch.randint(len(x), (32,), generator=g)
        s = torch.randint(len(x), (64,), generator=g)
        loss = (model(x[q], x[s], y[s]) - y[q]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        pred = model(xt, x[:1000], y[:1000])
        return (1 - (pred - yt).pow(2).mean() / yt.var()).item()


if __name__ == "__main__":
    print(main())
