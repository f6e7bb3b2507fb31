"""Contrastive pretraining (NT-Xent) of an accelerometer encoder; reports a nearest-neighbour probe."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32


def recordings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    t = torch.linspace(0, 6.2832, LENGTH)
    ph = torch.rand(n, 1, generator=g) * 6.2832
    x = torch.sin((y[:, None] + 1) * t + ph) + 0.1 * torch.randn(n, LENGTH, generator=g)
    return x, y


class Augmenter:
    def __init__(self, seed=0, drift=1.2, jitter=0.25):
        self.seed, self.drift, self.jitter = seed, drift, jitter

    def __call__(self, x):
        rng = torch.Generator().manual_seed(self.seed)
        n = len(x)
        ramp = torch.linspace(-1, 1, LENGTH)
        slope = torch.randn(n, 1, generator=rng)
        offset = torch.randn(n, 1, generator=rng)
        bump = torch.randn(n, 1, generator=rng) * torch.cos(ramp * 2)
        x = x + self.drift * (slope * ramp + offset + bump)
        gain = 0.6 + 0.8 * torch.rand(n, 1, generator=rng)
        shift = torch.randint(LENGTH, (n, 1), generator=rng)
        x = x.gather(1, (torch.arange(LENGTH)[None] + shift) % LENGTH)
        return gain * x + self.jitter * torch.randn(n, LENGTH, generator=rng)


class ContrastiveModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(LENGTH, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 24))

    def forward(self, x):
        return F.normalize(self.projection(self.encoder(x)), dim=1)


def nt_xent(za, zb, temperature=0.2):
    z = torch.cat([za, zb])
    sim = z @ z.T / temperature
    sim.fill_diagonal_(float("-inf"))
    n = len(za)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


@torch.no_grad()
def knn_probe(model, seed):
    model.eval()
    aug = Augmenter(seed=seed)
    x, y = recordings(900, seed)
    h = F.normalize(model.encoder(aug(x)), dim=1)
    near = (h[600:] @ h[:600].T).topk(7).indices
    return (y[:600][near].mode(1).values == y[600:]).float().mean().item()


def main():
    torch.manual_seed(14)
    x, _ = recordings(2560, 3)
    loader = DataLoader(TensorDataset(x), batch_size=128, shuffle=True, drop_last=True)
    augment = Augmenter(seed=4)
    model = ContrastiveModel()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(15):
        total = 0.0
        for (batch,) in loader:
            loss = nt_xent(model(augment(batch)), model(augment(batch)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    return knn_probe(model, 99)


if __name__ == "__main__":
    print(main())
