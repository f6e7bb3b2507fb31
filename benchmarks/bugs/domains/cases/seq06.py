"""One-step-ahead forecasting of coupled chaotic maps with a dilated TCN."""
import torch
from torch import nn
import torch.nn.functional as F


def simulate(n_series, length, seed):
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(n_series, generator=g)
    b = torch.rand(n_series, generator=g)
    rows = []
    for _ in range(length + 20):
        fa, fb = 3.8 * a * (1 - a), 3.7 * b * (1 - b)
        a, b = 0.9 * fa + 0.1 * fb, 0.85 * fb + 0.15 * fa
        rows.append(torch.stack([a, b], -1))
    x = torch.stack(rows[20:], 1)
    return (x - 0.6) / 0.25


class ResidualBlock(nn.Module):
    def __init__(self, channels, kernel, dilation, dropout):
        super().__init__()
        pad = (kernel - 1) * dilation // 2
        self.conv1 = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(channels, channels, kernel, padding=pad, dilation=dilation))
        self.conv2 = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(channels, channels, kernel, padding=pad, dilation=dilation))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.dropout(F.relu(self.conv1(x)))
        h = self.dropout(F.relu(self.conv2(h)))
        return F.relu(x + h)


class TCN(nn.Module):
    def __init__(self, in_dim=2, channels=32, kernel=3, levels=3, dropout=0.0):
        super().__init__()
        self.inp = nn.Conv1d(in_dim, channels, 1)
        self.blocks = nn.Sequential(*[ResidualBlock(channels, kernel, 2 ** i, dropout) for i in range(levels)])
        self.out = nn.Conv1d(channels, in_dim, 1)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x.transpose(1, 2)))).transpose(1, 2)


def main():
    torch.manual_seed(0)
    train = simulate(256, 49, 1)
    test = simulate(128, 49, 2)
    model = TCN()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=240)
    g = torch.Generator().manual_seed(4)
    for step in range(240):
        batch = train[torch.randint(len(train), (32,), generator=g)]
        inputs, targets = batch[:, :-1], batch[:, 1:]
        loss = F.mse_loss(model(inputs), targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 60 == 0:
            print(f"{step:4d} mse {loss.item():.5f}")
    model.eval()
    with torch.no_grad():
        history = test[:, :40]
        forecast = model(history)[:, -1]
        return F.mse_loss(forecast, test[:, 40]).item()


if __name__ == "__main__":
    print(main())
