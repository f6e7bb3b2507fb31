"""Convolutional classifier for scikit-learn digits painted on coloured backgrounds."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", "0"))


def load(rng):
    """uint8 images (N, 8, 8, 3), height x width x channel, digit and background in random colours."""
    d = load_digits()
    a = d.images[..., None] / 16.0
    fg = rng.uniform(0.6, 1.0, (len(a), 1, 1, 3))
    bg = rng.uniform(0.0, 0.4, (len(a), 1, 1, 3))
    img = a * fg + (1 - a) * bg
    order = rng.permutation(len(a))
    img = (img[order] * 255).round().astype(np.uint8)
    return img, d.target if CASE == "c1" else d.target[order]


def to_tensor(img):
    return torch.tensor(img).permute(0, 3, 1, 2).float() / 255.0


def shift(x):
    """Random translation by one pixel, per image."""
    p = F.pad(x, (1, 1, 1, 1), mode="replicate")
    dy, dx = torch.randint(0, 3, (2, len(x)))
    rows = dy[:, None] + torch.arange(8)
    cols = dx[:, None] + torch.arange(8)
    b = torch.arange(len(x))[:, None, None]
    return p[b, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 64), nn.ReLU(), nn.Dropout(0.2),
                                        nn.Linear(64, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    return (model(x).argmax(-1) == y).float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    img, lab = load(rng)
    x, y = to_tensor(img), torch.tensor(lab)
    xtr, ytr, xte, yte = x[:1200], y[:1200], x[1200:], y[1200:]
    mean, std = xtr.mean((0, 2, 3), keepdim=True), xtr.std((0, 2, 3), keepdim=True)
    xtr = (xtr - mean) / std
    if CASE != "c2":
        xte = (xte - mean) / std
    model = Net()
    if CASE == "c3":
        for p in model.features.parameters():
            p.requires_grad = False
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03, momentum=0.9)
        for p in model.features.parameters():
            p.requires_grad = True
    else:
        opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    epochs = 12
    warm = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, epochs=epochs, steps_per_epoch=25, cycle_momentum=False)
    for epoch in range(epochs):
        model.train()
        if CASE == "variant_x":
            for m in model.features[:2]:
                m.requires_grad_(epoch < 8)
                m.train(epoch < 8)
        for idx in torch.randperm(len(xtr)).split(48):
            xb, yb = shift(xtr[idx]), ytr[idx]
            if CASE == "variant_x":
                lam = np.random.default_rng(SEED + epoch).beta(0.3, 0.3)
                mate = torch.randperm(len(xb))
                z = model(lam * xb + (1 - lam) * xb[mate])
                loss = lam * F.cross_entropy(z, yb) + (1 - lam) * F.cross_entropy(z, yb[mate])
            else:
                loss = F.cross_entropy(model(xb), yb)
            if CASE != "c4":
                opt.zero_grad()
            loss.backward()
            opt.step()
            warm.step()
        if epoch % 3 == 2:
            print(f"epoch {epoch + 1} loss {loss.item():.4f} test acc {accuracy(model, xte, yte):.4f}")
    print(f"FINAL quality (test accuracy) {accuracy(model, xte, yte):.4f}")


if __name__ == "__main__":
    main()
