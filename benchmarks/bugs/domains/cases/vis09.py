"""DDPM on tiny two-bar images."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def toy_images(n, g):
    a = torch.randint(1, 6, (n,), generator=g)
    b = torch.randint(6, 11, (n,), generator=g)
    t = torch.arange(12)
    row = ((t[None] - a[:, None]).abs() <= 1)[:, :, None]
    col = ((t[None] - b[:, None]).abs() <= 1)[:, None, :]
    return (row | col).float().unsqueeze(1) * 2 - 1


class GaussianDiffusion:
    def __init__(self, steps=50, beta_start=1e-3, beta_end=0.15):
        self.steps = steps
        betas = torch.linspace(beta_start, beta_end, steps)
        self.alphas_bar = torch.cumprod(1 - betas, 0)

    def q_sample(self, x0, t):
        noise = torch.randn_like(x0)
        a = self.alphas_bar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise, noise

    def training_loss(self, model, x0):
        t = torch.randint(self.steps, (len(x0),))
        x_t, _ = self.q_sample(x0, t)
        noise = torch.randn_like(x0)
        return F.mse_loss(model(x_t, t), noise)

    @torch.no_grad()
    def reconstruct(self, model, x0, t):
        t = torch.full((len(x0),), t)
        x_t, _ = self.q_sample(x0, t)
        a = self.alphas_bar[t].view(-1, 1, 1, 1)
        return (x_t - (1 - a).sqrt() * model(x_t, t)) / a.sqrt()


class ResBlock(nn.Module):
    def __init__(self, c, emb):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        self.proj = nn.Linear(emb, c)
        self.norm1, self.norm2 = nn.GroupNorm(4, c), nn.GroupNorm(4, c)

    def forward(self, x, e):
        h = self.conv1(F.silu(self.norm1(x))) + self.proj(e)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class NoiseNet(nn.Module):
    def __init__(self, c=24, steps=50):
        super().__init__()
        self.temb = nn.Embedding(steps, 32)
        self.stem = nn.Conv2d(1, c, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(c, 32) for _ in range(3))
        self.head = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, 1, 3, padding=1))

    def forward(self, x, t):
        e = self.temb(t)
        h = self.stem(x)
        for b in self.blocks:
            h = b(h, e)
        return self.head(h)


def main():
    torch.manual_seed(8)
    g = torch.Generator().manual_seed(8)
    diffusion, model = GaussianDiffusion(), NoiseNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(180):
        loss = diffusion.training_loss(model, toy_images(24, g))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 45 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    x0 = toy_images(200, g)
    return F.mse_loss(diffusion.reconstruct(model, x0, 15), x0).item()


if __name__ == "__main__":
    print(main())
