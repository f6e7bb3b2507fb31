"""Segment circles and squares with a small U-Net."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"


def scenes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    masks = torch.zeros(count, 32, 32, dtype=torch.long)
    for mask in masks:
        (r, c), size = torch.randint(7, 25, (2,)), int(torch.randint(3, 7, ()))
        mask[(rows - r) ** 2 + (columns - c) ** 2 <= size**2] = 1
        (r, c), size = torch.randint(6, 26, (2,)), int(torch.randint(2, 6, ()))
        mask[((rows - r).abs() <= size) & ((columns - c).abs() <= size)] = 2
    images = torch.tensor([0.0, 1.0, 0.6])[masks].unsqueeze(1)
    return images + 0.25 * torch.randn_like(images), masks


class Block(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Block(1, 8), Block(8, 16), Block(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        if BUG == "upsampled_by_reshape":
            self.up2, self.up1 = nn.Conv2d(32, 64, 1), nn.Conv2d(16, 32, 1)
        self.dec2, self.dec1 = Block(32, 16), Block(16, 8)
        self.head = nn.Conv2d(8, 3, 1)

    def grow(self, up: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = up(x)
        if BUG == "upsampled_by_reshape":
            n, c, h, w = x.shape
            x = x.reshape(n, c // 4, 2 * h, 2 * w)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        x = self.middle(self.pool(skip2))
        x = self.grow(self.up2, x)
        x = self.dec2(torch.cat([x, x if BUG == "skip_dropped" else skip2], 1))
        x = self.grow(self.up1, x)
        x = self.dec1(torch.cat([x, x if BUG == "skip_dropped" else skip1], 1))
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    images, masks = scenes(256)
    test_images, test_masks = scenes(64)
    net = UNet()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(100):
        net.train()
        chosen = torch.randint(0, 256, (8,))
        x, y = images[chosen], masks[chosen]
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
            if BUG != "mask_not_flipped":
                y = y.flip(-1)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            net.eval()
            with torch.no_grad():
                found = net(test_images).argmax(1)
            ious = [
                ((found == k) & (test_masks == k)).sum() / ((found == k) | (test_masks == k)).sum()
                for k in (1, 2)
            ]
            print(f"{step + 1} loss {loss.item():.3f} mean IoU {sum(ious).item() / 2:.3f}")


if __name__ == "__main__":
    main()
