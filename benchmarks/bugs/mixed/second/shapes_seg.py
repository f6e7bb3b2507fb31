"""Segmentation of noisy shapes (background, disc, square) with a small U-Net; quality is the mean IoU."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
SIZE, CLASSES = 32, 3


def make_images(n, rng):
    yy, xx = np.mgrid[:SIZE, :SIZE]
    images = rng.normal(90, 25, (n, SIZE, SIZE))
    masks = np.zeros((n, SIZE, SIZE), dtype=np.int64)
    for i in range(n):
        for kind in (1, 2):
            for _ in range(rng.integers(1, 3)):
                cy, cx, r = rng.integers(4, SIZE - 4), rng.integers(4, SIZE - 4), rng.integers(3, 6)
                inside = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r if kind == 1 else (abs(yy - cy) < r) & (abs(xx - cx) < r)
                masks[i][inside] = kind
                images[i][inside] = rng.normal(165, 25, inside.sum())
    return images.clip(0, 255).astype(np.uint8), masks


class Shapes(torch.utils.data.Dataset):
    def __init__(self, images, masks, train):
        self.images, self.masks, self.train = images, masks, train
        self.rng = np.random.default_rng(SEED + 5)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i].astype(np.float32))
        mask = torch.from_numpy(self.masks[i])
        if self.train:
            if self.rng.random() < 0.5:
                image = image.flip(1)
                mask = mask if CASE == "b1" else mask.flip(1)
            if self.rng.random() < 0.5:
                image = image.flip(0)
                mask = mask if CASE == "b1" else mask.flip(0)
        if self.train or CASE != "b2":
            image = (image - 110) / 45
        return image[None], mask


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.e1, self.e2, self.mid = conv(1, c), conv(c, 2 * c), conv(2 * c, 4 * c)
        self.mid2 = conv(4 * c, 4 * c)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.d2, self.d1 = conv(4 * c, 2 * c), conv(2 * c, c)
        self.out = nn.Conv2d(c, CLASSES, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.e2(F.max_pool2d(a, 2))
        m = self.mid2(self.mid(F.max_pool2d(b, 2)))
        u = self.up2(m)
        u = self.d2(torch.cat([u, b], 1))
        v = self.up1(u)
        v = self.d1(torch.cat([v, a], 1))
        return self.out(v)


def dice_loss(logits, mask):
    prob = logits.softmax(0 if CASE == "b3" else 1)
    onehot = F.one_hot(mask, CLASSES).permute(0, 3, 1, 2).float()
    inter = (prob * onehot).sum((0, 2, 3))
    return 1 - ((2 * inter + 1) / ((prob + onehot).sum((0, 2, 3)) + 1)).mean()


@torch.no_grad()
def mean_iou(model, loader):
    model.eval()
    inter, union = torch.zeros(CLASSES), torch.zeros(CLASSES)
    for x, y in loader:
        pred = model(x).argmax(1)
        for c in range(CLASSES):
            inter[c] += ((pred == c) & (y == c)).sum()
            union[c] += ((pred == c) | (y == c)).sum()
    model.train()
    return (inter / union.clamp(min=1)).mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train = torch.utils.data.DataLoader(Shapes(*make_images(800, rng), True), batch_size=16, shuffle=True, drop_last=True)
    test = torch.utils.data.DataLoader(Shapes(*make_images(160, rng), False), batch_size=40)
    model = UNet()
    if CASE == "variant_x":
        for p in model.e1[0].parameters():   # the first filter bank stays as drawn
            p.requires_grad_(False)
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.08, momentum=0.9)
    elif CASE == "b4":
        opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    epochs = 6
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs, eta_min=1e-4)
    for epoch in range(epochs):
        for x, y in train:
            loss = dice_loss(model(x), y)
            if CASE == "variant_x":
                loss = loss + 0.5 * F.cross_entropy(model(x), y)
            if CASE != "b4":
                opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        print(f"epoch {epoch} loss {loss.item():.4f} test mIoU {mean_iou(model, test):.4f}")
    print(f"quality {mean_iou(model, test):.4f}")


if __name__ == "__main__":
    main()
