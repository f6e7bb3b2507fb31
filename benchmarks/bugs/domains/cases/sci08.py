"""Mixture fractions from raw detector counts; spectra are stored and processed in half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CHANNELS = 48


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    frac = -torch.rand(n, 3, generator=g).clamp(min=1e-4).log()
    frac = frac / frac.sum(1, keepdim=True)
    ch = torch.arange(CHANNELS).float()
    lines = torch.stack([torch.exp(-((ch - c) / w) ** 2) for c, w in ((10, 3.0), (22, 5.0), (30, 4.0))])
    exposure = 250 + 1750 * torch.rand(n, 1, generator=g)
    clean = exposure * (frac @ lines + 0.05)
    counts = torch.poisson(clean, generator=g)
    return counts.half(), frac[:, :2]


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-3):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        ms = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(ms + self.eps) * self.gain


class SpectrumNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.norm = RMSNorm(CHANNELS)
        self.fc1 = nn.Linear(CHANNELS, width)
        self.fc2 = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(self.fc1(h))
        h = h + F.gelu(self.fc2(h))
        return self.out(h)


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        p = model(x).float()
    model.train()
    return (1 - (p - y).pow(2).mean() / y.var(0).mean()).item()


def main():
    torch.manual_seed(7)
    x, y = spectra(2560, 1)
    xv, yv = spectra(600, 2)
    model = SpectrumNet()
    loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(12):
        for xb, yb in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                pred = model(xb)
            loss = F.mse_loss(pred.float(), yb)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        print(f"epoch {epoch} val R2 {evaluate(model, xv, yv):.4f}")
    return evaluate(model, xv, yv)


if __name__ == "__main__":
    print(main())
