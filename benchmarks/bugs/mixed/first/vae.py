"""Variational autoencoder on scikit-learn digits; quality is the held-out negative ELBO."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributions import Normal, kl_divergence

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))

LATENT = 8


class Encoder(nn.Module):
    def __init__(self, hid=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.mu = nn.Linear(hid, LATENT)
        self.logvar = nn.Linear(hid, LATENT)

    def forward(self, x):
        h = self.body(x)
        return self.mu(h), self.logvar(h).clamp(-10, 5)


class Decoder(nn.Module):
    def __init__(self, hid=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LATENT, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, 64))

    def forward(self, z):
        out = self.net(z)
        return torch.sigmoid(out) if CASE == "c3" else out


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def posterior(self, x):
        mu, logvar = self.encoder(x)
        return Normal(mu, torch.exp(0.5 * logvar))

    def forward(self, x):
        q = self.posterior(x)
        if CASE == "c1":
            z = q.sample()
        elif CASE == "c4":
            z = q.mean
        else:
            z = q.rsample()
        return self.decoder(z), q


def divergence(q):
    return kl_divergence(q, Normal(torch.zeros_like(q.mean), torch.ones_like(q.mean)))


@torch.no_grad()
def negative_elbo(model, x, samples=5):
    model.eval()
    q = model.posterior(x)
    rec = 0.0
    for _ in range(samples):
        rec = rec + F.binary_cross_entropy_with_logits(model.decoder(q.sample()), x, reduction="none").sum(1) / samples
    return (rec + divergence(q).sum(1)).mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    x = load_digits().data / 16.0
    x = torch.tensor(x[rng.permutation(len(x))], dtype=torch.float32)
    x = (x > 0.5).float()
    train, test = x[:1400], x[1400:]
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps, batch = 1000, 100
    for step in range(steps):
        model.train()
        xb = train[torch.randint(len(train), (batch,))]
        logits, q = model(xb)
        kl = divergence(q)
        if CASE == "c2":
            rec = F.binary_cross_entropy_with_logits(logits, xb)
            loss = rec + kl.sum(1).mean()
        elif CASE == "variant_x":
            rec = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / batch
            beta = min(1.0, step / 300)
            loss = rec + beta * kl.mean(0).clamp_min(0.1).sum()
        else:
            rec = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / batch
            loss = rec + kl.sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 250 == 249:
            print(f"step {step + 1} loss {loss.item():.4f} held-out negative elbo {negative_elbo(model, test):.4f}")
    print(f"FINAL quality (held-out negative ELBO, nats, lower is better) {negative_elbo(model, test):.4f}")


if __name__ == "__main__":
    main()
