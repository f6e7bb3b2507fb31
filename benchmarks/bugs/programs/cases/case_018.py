import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


def data(n):
    x = torch.rand(n, 3) * 2 - 1
    f = torch.sin(3 * x[:, 0]) * x[:, 1] + 0.5 * x[:, 2]
    s = 0.03 + 0.15 * (x[:, 0] > 0).float()
    return x, f + s * torch.randn(n), f


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.mean, self.logvar, self.q = nn.Linear(64, 1), nn.Linear(64, 1), nn.Linear(64, 2)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h).squeeze(1), self.logvar(h).squeeze(1).clamp(-9, 4), self.q(h)


def gaussian_nll(y, m, lv):
    return 0.5 * (lv + (y - m) ** 2 * torch.exp(-lv)).mean()


def pinball(y, q, taus=torch.tensor([0.1, 0.9])):
    e = y[:, None] - q
    return torch.maximum(taus * e, (taus - 1) * e).mean()


x, y, _ = data(3000)
xv, yv, fv = data(800)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for ep in range(12):
    net.train()
    for b in torch.randperm(3000).split(75):
        m, lv, q = net(x[b])
        loss = gaussian_nll(y[b], m, lv) + pinball(y[b], q)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 3.0)
        opt.step()
    net.eval()
    with torch.no_grad():
        m, lv, q = net(xv)
        err = ((m - fv) ** 2).mean().sqrt().item()
        cov = ((yv > q[:, 0]) & (yv < q[:, 1])).float().mean().item()
    print(f"epoch {ep} loss {loss.item():+.4f} rmse to truth {err:.4f} coverage {cov:.3f}")
print("final rmse", round(err, 4))
