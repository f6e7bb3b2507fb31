"""Masked autoencoder on signals: 60 % of the patches hidden, fixed sinusoidal positions, loss on hidden patches only."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

P, N, D = 4, 16, 48


def sincos(n, d):
    pos = torch.arange(n).float()[:, None]
    w = torch.exp(-math.log(100.0) * torch.arange(d // 2) / (d // 2))
    return torch.cat([(pos * w).sin(), (pos * w).cos()], -1)[None]


class MAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pos", sincos(N, D))
        self.embed = nn.Linear(P, D)
        mk = lambda: nn.TransformerEncoderLayer(D, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.ModuleList([mk(), mk()])
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D))
        self.decoder = mk()
        self.out = nn.Linear(D, P)

    def forward(self, x, keep):
        B = len(x)
        tok = self.embed(x) + self.pos
        vis = tok.gather(1, keep[..., None].expand(-1, -1, D))
        for l in self.encoder:
            vis = l(vis)
        full = self.mask_token.expand(B, N, D).scatter(1, keep[..., None].expand(-1, -1, D), vis)
        return self.out(self.decoder(full + self.pos))


def waves(n, g):
    t = torch.arange(N * P).float() / (N * P) * 6.2832
    f = torch.randint(1, 4, (n, 1), generator=g).float()
    ph = torch.rand(n, 1, generator=g) * 6.2832
    a = 0.5 + torch.rand(n, 1, generator=g)
    return (a[..., None] * torch.sin(f[..., None] * t + ph[..., None])).sum(1).view(n, N, P)


def step_loss(model, x, g):
    order = torch.rand(len(x), N, generator=g).argsort(-1)
    keep, hide = order[:, :7], order[:, 7:]
    pred = model(x, keep)
    w = torch.zeros(len(x), N).scatter(1, hide, 1.0)
    per = F.mse_loss(pred, x, reduction="none").mean(-1)
    return (per * w).sum() / w.sum()


def main():
    torch.manual_seed(13)
    g = torch.Generator().manual_seed(13)
    model = MAE()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [
        torch.optim.lr_scheduler.LinearLR(opt, 0.05, 1.0, 20), torch.optim.lr_scheduler.CosineAnnealingLR(opt, 230)], [20])
    for s in range(250):
        loss = step_loss(model, waves(32, g), g)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if s % 50 == 0:
            print(s, loss.item())
    model.eval()
    with torch.no_grad():
        x = waves(300, g)
        return (step_loss(model, x, g) / x.var()).item()


if __name__ == "__main__":
    print(main())
