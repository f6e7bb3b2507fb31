"""Cell segmentation: a small U-Net on synthetic blobs, with random flips."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def render(rs, size=32):
    img = rs.normal(0, 0.25, (size, size))
    mask = np.zeros((size, size))
    yy, xx = np.mgrid[:size, :size]
    for _ in range(rs.randint(1, 4)):
        cy, cx, r = rs.randint(4, size - 4), rs.randint(4, size - 4), rs.uniform(2.5, 5)
        blob = (yy - cy) ** 2 + (xx - cx) ** 2 < r ** 2
        img[blob] += rs.uniform(0.6, 1.2)
        mask[blob] = 1
    return img.astype("float32")[None], mask.astype("float32")[None]


class Cells(Dataset):
    def __init__(self, n, seed, train):
        rs = np.random.RandomState(seed)
        self.items = [render(rs) for _ in range(n)]
        self.train = train

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        img, mask = (torch.from_numpy(a) for a in self.items[i])
        if self.train:
            if torch.rand(1) < 0.5:
                img = img.flip(-1)
            if torch.rand(1) < 0.5:
                img = img.flip(-2)
        return img, mask


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down1, self.down2, self.mid = block(1, c), block(c, 2 * c), block(2 * c, 2 * c)
        self.up2, self.up1 = block(4 * c, c), block(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        u = self.up2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        u = self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return self.head(u)


def dice_loss(logits, mask):
    p = torch.sigmoid(logits)
    inter = (p * mask).sum((1, 2, 3))
    return (1 - (2 * inter + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def iou(model, loader):
    model.eval()
    inter = union = 0.0
    with torch.no_grad():
        for x, m in loader:
            p = (model(x) > 0).float()
            inter += (p * m).sum().item()
            union += ((p + m) > 0).sum().item()
    model.train()
    return inter / union


def main():
    torch.manual_seed(0)
    train = DataLoader(Cells(320, 1, True), batch_size=16, shuffle=True)
    val = DataLoader(Cells(64, 2, False), batch_size=32)
    model = UNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(6):
        for x, m in train:
            out = model(x)
            loss = F.binary_cross_entropy_with_logits(out, m) + dice_loss(out, m)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f} val iou {iou(model, val):.3f}")
    return iou(model, val)


if __name__ == "__main__":
    print(main())
