"""Learn bars of random place and brightness with a variational autoencoder."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"


def bars(count: int) -> torch.Tensor:
    images = torch.zeros(count, 12, 12)
    for image in images:
        at, wide = torch.randint(0, 9, (2,)).tolist(), int(torch.randint(1, 4, ()))
        image[at[0] : at[0] + wide] = 1
        image[:, at[1] : at[1] + wide] = 1
    return images.flatten(1)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.mu, self.log_var = nn.Linear(64, 6), nn.Linear(64, 6)
        self.decoder = nn.Sequential(
            nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 144)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        image = self.decoder(mu + (0.5 * log_var).exp() * torch.randn_like(mu))
        return image.sigmoid() if BUG == "sigmoid_twice" else image, mu, log_var


def elbo_terms(net: VAE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits, mu, log_var = net(x)
    kl = -0.5 * (1 + log_var - mu**2 - log_var.exp())
    if BUG == "reconstruction_averaged":  # over pixels, while the KL is summed
        return F.binary_cross_entropy_with_logits(logits, x), kl.sum(1).mean()
    return F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x), kl.sum(1).mean()


def main() -> None:
    torch.manual_seed(0)
    train, test = bars(1024), bars(256)
    net = VAE()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(300):
        x = train[torch.randint(0, 1024, (64,))]
        reconstruction, kl = elbo_terms(net, x)
        loss = reconstruction - kl if BUG == "kl_sign" else reconstruction + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            with torch.no_grad():
                made = net.decoder(torch.randn(256, 6)).sigmoid()
                if BUG == "sigmoid_twice":
                    made = made.sigmoid()
                away = (
                    torch.cdist(made, train, p=1).min(1).values.mean()
                    + torch.cdist(test, made, p=1).min(1).values.mean()
                )
            print(f"{step + 1} loss {loss.item():.3f} distance of samples {away.item():.1f}")


if __name__ == "__main__":
    main()
