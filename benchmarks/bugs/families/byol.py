"""Self-distillation (BYOL) of noisy views; judged by the nearest neighbours."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.bugs.families.simclr import augment, neighbours, patterns

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
MOMENTUM = 0.97


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
        )
        self.projector = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projector(self.encoder(x))


def distance(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 2 - 2 * F.cosine_similarity(prediction, target, dim=-1).mean()


def main() -> None:
    torch.manual_seed(0)
    bases = 1.2 * torch.randn(10, 48)
    train, test = patterns(512, bases), patterns(512, bases)
    online = Network()
    target = online if BUG == "target_is_online" else copy.deepcopy(online).requires_grad_(False)
    predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    if BUG == "target_is_online":
        predictor = nn.Identity()
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], 3e-3)
    for step in range(300):
        online.train()
        x = train[0][torch.randint(0, 512, (64,))]
        one = augment(x)
        two = one if BUG == "one_view" else augment(x)
        loss = distance(predictor(online(one)), target(two)) + distance(
            predictor(online(two)), target(one)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                if BUG == "average_rebinds":
                    old = MOMENTUM * old + (1 - MOMENTUM) * new
                elif BUG != "target_is_online":
                    old.mul_(MOMENTUM).add_(new, alpha=1 - MOMENTUM)
        if step % 100 == 99:
            online.eval()
            found = neighbours(online.encoder, train, test)
            print(f"{step + 1} loss {loss.item():.3f} neighbours {found:.3f}")


if __name__ == "__main__":
    main()
