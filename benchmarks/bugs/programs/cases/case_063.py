import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


class ConvVAE(nn.Module):
    def __init__(self, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.mu, self.lv = nn.Linear(128, z), nn.Linear(128, z)
        self.up = nn.Linear(z, 128)
        self.dec = nn.Sequential(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h).clamp(-8, 8)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp() if self.training else mu
        return self.dec(F.relu(self.up(z)).view(-1, 32, 2, 2)), mu, lv


x = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
xtr, xte = x[:1500], x[1500:]
vae = ConvVAE()
opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
step = 0
for ep in range(1, 21):
    vae.train()
    for b in torch.randperm(1500).split(75):
        beta = min(1.0, step / 200)
        rec, mu, lv = vae(xtr[b])
        r = F.binary_cross_entropy_with_logits(rec, xtr[b], reduction="sum")
        k = -0.5 * (1 + lv - mu ** 2 - lv.exp()).sum()
        loss = r + beta * k
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    if ep % 4 == 0:
        vae.eval()
        with torch.no_grad():
            mse = F.mse_loss(torch.sigmoid(vae(xte)[0]), xte).item()
        print(f"epoch {ep} loss {loss.item():.1f} rec {r.item():.1f} kl {k.item():.1f} test mse {mse:.4f}")
print("final test mse", round(mse, 4))
