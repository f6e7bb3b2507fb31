"""Fine-tune a pretrained convolutional backbone on four new classes with small batches."""

import pathlib
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
FILE = pathlib.Path(tempfile.gettempdir()) / "comgra_families_backbone.pt"


def textures(count: int, classes: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Gratings of several orientations in uint8-like brightness."""
    labels = torch.randint(classes.start, classes.stop, (count,))
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = (labels * torch.pi / 12)[:, None, None]
    wave = (
        0.9 * (angle.cos() * rows + angle.sin() * columns) + 6.28 * torch.rand(count, 1, 1)
    ).sin()
    images = 120 + 30 * wave + 25 * torch.randn(count, 16, 16)
    return images.unsqueeze(1), labels - classes.start


def normalise(x: torch.Tensor) -> torch.Tensor:
    return (x - 120) / 33


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Linear(24, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.backbone(x))


def pretrain() -> None:
    torch.manual_seed(1)
    net = Net(8)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    images, labels = textures(2048, range(8))
    for _ in range(400):
        chosen = torch.randint(0, 2048, (32,))
        loss = F.cross_entropy(net(normalise(images[chosen])), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("pretrained", loss.item())
    torch.save(net.state_dict(), FILE)


def main() -> None:
    torch.manual_seed(0)
    images, labels = textures(512, range(8, 12))
    test_images, test_labels = textures(256, range(8, 12))
    net = Net(8)
    net.load_state_dict(torch.load(FILE))
    net.backbone.requires_grad_(False)
    if BUG == "optimizer_before_head":
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    net.fc = nn.Linear(24, 4)
    if BUG != "optimizer_before_head":
        optimizer = torch.optim.Adam(net.fc.parameters(), 1e-2)
    for step in range(300):
        net.train()
        if BUG != "frozen_but_training":
            net.backbone.eval()
        chosen = torch.randint(0, 512, (2,))
        x = images[chosen]
        if BUG != "not_normalised_in_training":
            x = normalise(x)
        loss = F.cross_entropy(net(x), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            net.eval()
            with torch.no_grad():
                right = (net(normalise(test_images)).argmax(1) == test_labels).float().mean()
            print(f"{step + 1} loss {loss.item():.3f} accuracy {right.item():.3f}")


if __name__ == "__main__":
    if BUG == "pretrain":  # once, in a run of its own
        pretrain()
    else:
        main()
