"""VQ autoencoder: straight-through codes, commitment loss, EMA codebook, dead-code restarts."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class VQ(nn.Module):
    def __init__(self, k=32, d=8, decay=0.95):
        super().__init__()
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("count", torch.ones(k))
        self.register_buffer("sums", self.codes.clone())
        self.decay = decay

    def forward(self, z):
        B, C, H, W = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, C)
        idx = torch.cdist(flat, self.codes).argmin(-1)
        q = self.codes[idx]
        if self.training:
            with torch.no_grad():
                one = F.one_hot(idx, len(self.codes)).float()
                self.count.lerp_(one.sum(0), 1 - self.decay)
                self.sums.lerp_(one.T @ flat, 1 - self.decay)
                self.codes.copy_(self.sums / self.count.clamp(min=1e-3)[:, None])
                dead = self.count < 0.3
                if dead.any():
                    pick = flat[torch.randint(len(flat), (int(dead.sum()),))]
                    self.codes[dead] = pick
                    self.sums[dead] = pick
                    self.count[dead] = 1.0
        commit = F.mse_loss(flat, q)
        st = flat + (q - flat).detach()
        return st.view(B, H, W, C).permute(0, 3, 1, 2), 0.25 * commit


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 8, 1))
        self.vq = VQ()
        self.dec = nn.Sequential(nn.ConvTranspose2d(8, 24, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(24, 16, 4, 2, 1), nn.ReLU(),
                                 nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, x):
        q, commit = self.vq(self.enc(x))
        return self.dec(q), commit


def waves(n, g):
    t = torch.arange(16).float()
    f = torch.rand(n, 2, 1, 1, generator=g) * 0.7
    ph = torch.rand(n, 1, 1, generator=g) * 6.28
    return torch.sin(f[:, 0] * t[None, :, None] + f[:, 1] * t[None, None] + ph).unsqueeze(1)


def main():
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(250):
        x = waves(32, g)
        rec, commit = model(x)
        loss = F.mse_loss(rec, x) + commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 4), round(commit.item(), 4))
    model.eval()
    x = waves(200, g)
    with torch.no_grad():
        return (F.mse_loss(model(x)[0], x) / x.var()).item()


if __name__ == "__main__":
    print(main())
