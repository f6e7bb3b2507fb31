"""Segmentation of synthetic leaf pictures (background, leaf, lesion) with a small U-shaped network."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
SIZE, CLASSES = 32, 3


def picture(rng):
    """A bright ellipse on clutter, with small dark spots; spots outside of the leaf are background."""
    yy, xx = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    cy, cx = rng.uniform(11, 21, 2)
    ry, rx = rng.uniform(6, 11, 2)
    leaf = ((yy - cy) / ry) ** 2 + ((xx - cx) / rx) ** 2 < 1
    mask = leaf.astype(np.int64)
    img = np.stack([0.35 + 0.1 * leaf, 0.3 + 0.25 * leaf, 0.3 - 0.05 * leaf]).astype(np.float32)
    for _ in range(rng.integers(4, 9)):
        sy, sx, r = rng.uniform(2, SIZE - 2), rng.uniform(2, SIZE - 2), rng.uniform(1.2, 3.0)
        spot = (yy - sy) ** 2 + (xx - sx) ** 2 < r * r
        img[:, spot] = np.array([0.3, 0.2, 0.1])[:, None]
        mask[spot & leaf] = 2
    img += rng.normal(0, 0.08, img.shape)
    return (img.clip(0, 1) * 255).astype(np.uint8), mask


def to_float(images):
    return torch.from_numpy(images).float() / 255.0


def augment(x, y, rng):
    if rng.random() < 0.5:
        x = x.flip(-1)
        if CASE != "i1":
            y = y.flip(-1)
    if rng.random() < 0.5:
        x = x.flip(-2)
        if CASE != "i1":
            y = y.flip(-2)
    return x, y


def conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.LeakyReLU(0.1))


class UNet(nn.Module):
    def __init__(self, w=10):
        super().__init__()
        self.d1, self.d2, self.mid = conv(3, w), conv(w, 2 * w), conv(2 * w, 4 * w)
        self.up2, self.up1 = conv(6 * w, 2 * w), conv(3 * w, w)
        self.side = nn.Conv2d(2 * w, CLASSES, 1)
        self.out = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x):
        a = self.d1(x - 0.4)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        u = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        v = self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return self.out(v), self.side(u)


def soft_dice(logits, y):
    p = logits.softmax(1)
    t = F.one_hot(y, CLASSES).permute(0, 3, 1, 2).float()
    return 1 - (2 * (p * t).sum((0, 2, 3)) / (p + t).sum((0, 2, 3))).mean()


def objective(out, y):
    logits, side = out
    if CASE == "variant_x":                                    # dice, and a coarse head on the half-size mask
        return soft_dice(logits, y) + F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(side, y[:, ::2, ::2])
    logp = F.log_softmax(logits, dim=0 if CASE == "i2" else 1)
    if CASE == "i4":
        freq = torch.bincount(y.flatten(), minlength=CLASSES).float()
        return F.nll_loss(logp, y, weight=freq / freq.sum())
    return F.nll_loss(logp, y)


@torch.no_grad()
def mean_iou(model, x, y):
    model.eval()
    pred = torch.cat([model(c)[0].argmax(1) for c in x.split(50)])
    model.train()
    ious = []
    for k in range(CLASSES):
        p, t = pred == k, y == k
        ious.append(((p & t).sum() / (p | t).sum().clamp(min=1)).item())
    return sum(ious) / CLASSES


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    images, masks = zip(*[picture(rng) for _ in range(500)])
    images, masks = np.stack(images), torch.from_numpy(np.stack(masks))
    x, y = to_float(images[:400]), masks[:400]
    if CASE == "i3":
        xt = torch.from_numpy(images[400:]).float()
    else:
        xt = to_float(images[400:])
    yt = masks[400:]
    model = UNet()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=250, power=0.9)
    if CASE == "variant_x":
        model.d1[0].weight.requires_grad_(False)
    for step in range(250):
        pick = torch.from_numpy(rng.integers(len(x), size=10))
        xb, yb = augment(x[pick], y[pick], rng)
        loss = objective(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 50 == 49:
            print("step %d  loss %.4f  held-out mIoU %.4f" % (step + 1, loss.item(), mean_iou(model, xt, yt)))
    print("final held-out mIoU %.4f" % mean_iou(model, xt, yt))


if __name__ == "__main__":
    main()
