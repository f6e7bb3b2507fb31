"""Contrastive learning (NT-Xent) of noisy views; judged by the nearest neighbours."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
TEMPERATURE = 0.1
NUISANCE = torch.linalg.qr(torch.randn(48, 16, generator=torch.Generator().manual_seed(1)))[0].T * 3


def patterns(count: int, bases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, len(bases), (count,))
    nuisance = torch.randn(count, 16) @ NUISANCE
    return bases[labels] * torch.randn(count, 1).sign() + 0.3 * torch.randn(
        count, 48
    ) + nuisance, labels


def augment(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.randn(len(x), 16) @ NUISANCE
    return (x + 0.3 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)


def nt_xent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    n = len(a)
    z = F.normalize(torch.cat([a, b]), dim=1)
    similarity = z @ z.T
    similarity = (
        similarity * TEMPERATURE if BUG == "temperature_multiplied" else similarity / TEMPERATURE
    )
    if BUG == "self_is_target":
        return F.cross_entropy(similarity, torch.arange(2 * n))
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, targets)


def neighbours(
    encoder: nn.Module, train: tuple[torch.Tensor, ...], test: tuple[torch.Tensor, ...]
) -> float:
    """How many of the five nearest training samples (cosine) have the label of the test sample."""
    with torch.no_grad():
        near = F.normalize(encoder(test[0])) @ F.normalize(encoder(train[0])).T
        return (train[1][near.topk(5).indices] == test[1][:, None]).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    bases = 0.6 * torch.randn(10, 48)
    train, test = patterns(512, bases), patterns(512, bases)
    encoder = nn.Sequential(
        nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
    )
    projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], 3e-3)
    for step in range(300):
        encoder.train()
        x = train[0][torch.randint(0, 512, (64,))]
        y = train[0][torch.randint(0, 512, (64,))] if BUG == "pairs_shuffled" else x
        loss = nt_xent(projector(encoder(augment(x))), projector(encoder(augment(y))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            encoder.eval()
            found = neighbours(encoder, train, test)
            print(f"{step + 1} loss {loss.item():.3f} neighbours {found:.3f}")


if __name__ == "__main__":
    main()
