"""Learn a metric from pairs with the contrastive loss; judged by neighbours of unseen classes."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.bugs.families.simclr import patterns

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
MARGIN = 2.0


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)
        )


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = Encoder()
        self.right = Encoder() if BUG == "towers_not_shared" else self.left

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        squared = (self.left(a) - self.right(b)).pow(2).sum(1)
        return squared.sqrt() if BUG == "root_of_zero" else (squared + 1e-6).sqrt()


def contrastive(distance: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    far = F.relu(distance - MARGIN) if BUG == "margin_sign" else F.relu(MARGIN - distance)
    return torch.where(same, distance**2, far**2).mean()


def main() -> None:
    torch.manual_seed(0)
    bases = 1.2 * torch.randn(40, 48)
    (train, labels), (test, test_labels) = patterns(512, bases[:30]), patterns(256, bases[30:])
    net = Siamese()
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(300):
        first = torch.randint(0, 512, (64,))
        same = torch.rand(64) < 0.5
        second = torch.tensor(
            [
                int((labels == labels[i]).float().multinomial(1))
                if s
                else int((labels != labels[i]).float().multinomial(1))
                for i, s in zip(first, same, strict=True)
            ]
        )
        loss = contrastive(net(train[first], train[second]), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            with torch.no_grad():
                distances = torch.cdist(net.left(test), net.right(test)).fill_diagonal_(torch.inf)
            right = (test_labels[distances.argmin(1)] == test_labels).float().mean()
            print(f"{step + 1} loss {loss.item():.3f} nearest neighbour {right.item():.3f}")


if __name__ == "__main__":
    main()
