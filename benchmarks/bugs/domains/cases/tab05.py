"""Heteroscedastic regression with a Gaussian NLL that goes far below zero, then SWA."""
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g) * 2 - 1
    mu = 0.5 * torch.sin(3 * x[:, 0]) * x[:, 1] + 0.2 * x[:, 2] ** 2
    sd = 0.005 + 0.04 * torch.sigmoid(4 * x[:, 3])
    return x, mu + sd * torch.randn(n, generator=g)


class Hetero(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, 1)
        self.logvar = nn.Linear(64, 1)
        nn.init.zeros_(self.logvar.weight)
        nn.init.zeros_(self.logvar.bias)

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h).squeeze(1), self.logvar(h.detach()).squeeze(1).clamp(-12, 4)


def nll(mu, lv, y):
    return 0.5 * (lv + (y - mu) ** 2 * torch.exp(-lv)).mean()


def main():
    torch.manual_seed(3)
    x, y = make(3000, 0)
    xt, yt = make(1000, 1)
    ds = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(ds, batch_size=200, shuffle=True)
    model = Hetero()
    swa = AveragedModel(model)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    swa_sched = SWALR(opt, swa_lr=1e-3, anneal_epochs=3)
    for epoch in range(15):
        for xb, yb in loader:
            mu, lv = model(xb)
            if epoch < 3:
                loss = nn.functional.mse_loss(mu, yb)
            else:
                loss = nll(mu, lv, yb)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
        if epoch >= 9:
            swa.update_parameters(model)
            swa_sched.step()
        print(epoch, round(loss.item(), 4))
    update_bn(loader, swa)
    swa.eval()
    with torch.no_grad():
        mu, lv = swa(xt)
    return nll(mu, lv, yt).item()


if __name__ == "__main__":
    print(main())
