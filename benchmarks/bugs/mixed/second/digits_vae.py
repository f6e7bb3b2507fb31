"""Variational autoencoder on the 8x8 digits; quality is the held-out negative ELBO in nats per image."""
import os
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
LATENT = 8


class VAE(nn.Module):
    def __init__(self, hidden=128):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu, self.logvar = nn.Linear(hidden, LATENT), nn.Linear(hidden, LATENT)
        self.dec = nn.Sequential(nn.Linear(LATENT, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def draw(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        if CASE == "b1":
            return torch.distributions.Normal(mu, std).sample()
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.dec(self.draw(mu, logvar)), mu, logvar


def terms(logits, x, mu, logvar):
    if CASE == "b2":
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="mean")
    else:
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return recon, kl


@torch.no_grad()
def negative_elbo(model, x, draws=5):
    model.eval()
    total = 0.0
    for _ in range(draws):
        logits, mu, logvar = model(x)
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        total += (recon - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()).item()
    model.train()
    return total / draws


def main():
    torch.manual_seed(SEED)
    images = torch.tensor(load_digits().data, dtype=torch.float32)
    order = torch.randperm(len(images))
    images = (images > 7).float()
    train, test = images[order[:1400]], images[order[1400:]]
    model = VAE()
    if CASE == "b3":
        opt = torch.optim.Adam(model.parameters(), lr=0.05)
    elif CASE == "variant_x":
        opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    step, batch = 0, 64
    for epoch in range(40):
        for idx in torch.randperm(len(train)).split(batch):
            x = train[idx]
            logits, mu, logvar = model(x)
            recon, kl = terms(logits, x, mu, logvar)
            if CASE == "variant_x":           # KL warm-up over the first epochs and a floor of free nats
                loss = recon + min(1.0, (epoch + 1) / 10) * kl.clamp(min=1.0)
            elif CASE == "b4":
                loss = recon - kl
            else:
                loss = recon + kl
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 20.0)
            opt.step()
            step += 1
        if (epoch + 1) % 8 == 0:
            print(f"epoch {epoch + 1} step {step} recon {recon.item():.3f} kl {kl.item():.3f} test -elbo {negative_elbo(model, test):.3f}")
    print(f"quality {negative_elbo(model, test):.4f}")


if __name__ == "__main__":
    main()
