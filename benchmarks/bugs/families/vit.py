"""Say in which quadrant a stroke lies and how it points, with a small vision transformer."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BUG = sys.argv[1] if len(sys.argv) > 1 else "healthy"
PATCH, SIDE, WIDTH = 4, 16, 32


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A stroke, upright or level, in one of four quadrants: eight classes."""
    images = 0.3 * torch.randn(count, 1, SIDE, SIDE)
    labels = torch.randint(0, 8, (count,))
    for image, label in zip(images, labels.tolist(), strict=True):
        quadrant, upright = label // 2, label % 2
        r, c = (
            torch.randint(0, 3, (2,)) + torch.tensor([8 * (quadrant // 2), 8 * (quadrant % 2)])
        ).tolist()
        if upright:
            image[0, r : r + 6, c + 2] += 1.5
        else:
            image[0, r + 2, c : c + 6] += 1.5
    return images, labels


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=BUG != "batch_first_missing")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.dropout = nn.Dropout(0.9 if BUG == "dropout_as_keep_probability" else 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.dropout(self.attention(h, h, h, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        count = (SIDE // PATCH) ** 2
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, count + 1, WIDTH))
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        n = images.shape[0]
        patches = F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(n, -1, -1), self.embed(patches)], 1)
        if BUG != "positions_missing":
            x = x + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def main() -> None:
    torch.manual_seed(0)
    images, labels = pictures(1024)
    test_images, test_labels = pictures(256)
    net = ViT()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for step in range(250):
        net.train()
        chosen = torch.randint(0, 1024, (32,))
        loss = F.cross_entropy(net(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            net.eval()
            with torch.no_grad():
                right = (net(test_images).argmax(1) == test_labels).float().mean()
            print(f"{step + 1} loss {loss.item():.3f} accuracy {right.item():.3f}")


if __name__ == "__main__":
    main()
