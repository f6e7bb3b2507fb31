"""Denoising diffusion with a zero-initialised output, EMA weights and a cosine noise schedule."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

T = 40
_t = torch.arange(T + 1) / T
_f = torch.cos((_t + 0.01) / 1.01 * math.pi / 2) ** 2
ABAR = (_f / _f[0])[1:].clamp(1e-4, 0.9999)


class Block(nn.Module):
    def __init__(self, c, temb):
        super().__init__()
        self.n = nn.GroupNorm(4, c)
        self.c1 = nn.Conv2d(c, c, 3, padding=1)
        self.c2 = nn.Conv2d(c, c, 3, padding=1)
        self.film = nn.Linear(temb, 2 * c)
        nn.init.zeros_(self.c2.weight)
        nn.init.zeros_(self.c2.bias)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)

    def forward(self, x, t):
        s, b = self.film(t)[:, :, None, None].chunk(2, 1)
        h = self.c1(F.silu(self.n(x)))
        return x + self.c2(F.silu(h * (1 + s) + b))


class Denoiser(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU())
        self.inp = nn.Conv2d(1, c, 3, padding=1)
        self.down = nn.Conv2d(c, c, 3, 2, 1)
        self.blocks = nn.ModuleList(Block(c, 32) for _ in range(3))
        self.out = nn.Conv2d(c, 1, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        freq = torch.exp(torch.arange(8) * -0.5)
        a = t.float()[:, None] * freq
        emb = self.time(torch.cat([a.sin(), a.cos()], -1))
        h0 = self.blocks[0](self.inp(x), emb)
        h = self.blocks[1](self.down(h0), emb)
        h = self.blocks[2](F.interpolate(h, scale_factor=2) + h0, emb)
        return self.out(h)


def data(n, g):
    c = torch.randint(3, 9, (n, 2), generator=g)
    t = torch.arange(12)
    m = ((t[None] - c[:, :1]).abs() <= 2)[:, None, :] & ((t[None] - c[:, 1:]).abs() <= 2)[:, :, None]
    return m.float().unsqueeze(1) * 2 - 1


def eps_loss(model, x0, g):
    t = torch.randint(T, (len(x0),), generator=g)
    e = torch.randn(x0.shape, generator=g)
    a = ABAR[t][:, None, None, None]
    return F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * e, t), e)


def main():
    torch.manual_seed(7)
    g = torch.Generator().manual_seed(7)
    model = Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    for step in range(240):
        for gr in opt.param_groups:
            gr["lr"] = 3e-3 * min(1, (step + 1) / 20)
        loss = eps_loss(model, data(20, g), g)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        d = min(0.97, (1 + step) / (10 + step))
        with torch.no_grad():
            for p, q in zip(model.parameters(), ema.parameters()):
                q.lerp_(p, 1 - d)
        if step % 60 == 0:
            print(step, loss.item())
    with torch.no_grad():
        return eps_loss(ema, data(400, g), g).item()


if __name__ == "__main__":
    print(main())
