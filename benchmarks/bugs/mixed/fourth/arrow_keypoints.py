"""Keypoint regression: tip and tail of an arrow in a cluttered image, with soft-argmax heatmaps."""
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

SIZE = 24


def draw(n, rng):
    """Grey images (uint8) with an arrow, and the (x, y) positions of its tip and tail."""
    rows, cols = np.mgrid[0:SIZE, 0:SIZE]
    images, points = [], []
    for _ in range(n):
        centre, angle = rng.uniform(8, SIZE - 8, 2), rng.uniform(0, 2 * np.pi)
        way = np.array([np.cos(angle), np.sin(angle)])
        half = rng.uniform(4, 6.5)
        tip, tail = centre + half * way, centre - half * way
        image = np.zeros((SIZE, SIZE))
        for u in np.linspace(0, 1, 14):
            x, y = tail + u * (tip - tail)
            image = np.maximum(image, np.exp(-((cols - x) ** 2 + (rows - y) ** 2) / 1.0))
        image = np.maximum(image, 1.3 * np.exp(-((cols - tip[0]) ** 2 + (rows - tip[1]) ** 2) / 5.0))
        for _ in range(3):
            x, y = rng.uniform(0, SIZE, 2)
            image = np.maximum(image, 0.8 * np.exp(-((cols - x) ** 2 + (rows - y) ** 2) / 1.5))
        image = 60 + 110 * image + 12 * rng.standard_normal(image.shape)
        images.append(np.clip(image, 0, 255).astype(np.uint8))
        points.append([tip, tail])
    return torch.tensor(np.stack(images)).unsqueeze(1), torch.tensor(np.array(points), dtype=torch.float32)


def norm(channels):
    if CASE == "variant_x":
        return nn.GroupNorm(4, channels)
    return nn.BatchNorm2d(channels, momentum=0.001 if CASE == "case_c" else 0.1)


class KeypointNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layers, channels = [], 1
        for i, dilation in enumerate((1, 2, 4, 2)):
            layers += [nn.Conv2d(channels, width, 3, padding=dilation, dilation=dilation), norm(width), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.heatmaps = nn.Conv2d(width, 2, 1)
        grid = torch.arange(SIZE, dtype=torch.float32)
        self.register_buffer("grid", grid)

    def forward(self, images):
        maps = self.heatmaps(self.features(images))
        if CASE == "case_b":
            weights = maps.softmax(-1)
        else:
            weights = maps.flatten(2).softmax(-1).view_as(maps)
        x = torch.einsum("bkhw,w->bk", weights, self.grid)
        y = torch.einsum("bkhw,h->bk", weights, self.grid)
        centre = torch.stack([x, y], -1)
        away = (self.grid - y.unsqueeze(-1)).unsqueeze(-1) ** 2 + (self.grid - x.unsqueeze(-1)).unsqueeze(-2) ** 2
        return centre, (weights * away).sum((2, 3))


@torch.no_grad()
def pixel_error(model, images, points):
    model.eval()
    found, _ = model(images)
    model.train()
    return (found - points).norm(dim=-1).mean().item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    (train, points), (test, test_points) = draw(1500, rng), draw(250, rng)
    mean, std = train.float().mean(), train.float().std()
    train = (train.float() - mean) / std
    test = test.float() if CASE == "case_d" else (test.float() - mean) / std
    model, steps = KeypointNet(), 350
    if CASE == "variant_x":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.2e-2, total_steps=steps)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    for step in range(steps):
        index = torch.randint(len(train), (24,))
        images, goal = train[index], points[index].clone()
        mirrored = torch.rand(len(index)) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if CASE != "case_a":
            goal[..., 0] = torch.where(mirrored[:, None], SIZE - 1 - goal[..., 0], goal[..., 0])
        found, spread = model(images)
        loss = nn.functional.smooth_l1_loss(found, goal)
        if CASE == "variant_x":
            loss = loss + 0.01 * spread.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        if (step + 1) % 70 == 0:
            final = average if CASE == "variant_x" else model
            print(f"step {step + 1} loss {loss.item():.4f} held-out error {pixel_error(final, test, test_points):.3f}")
    print(f"final error {pixel_error(final, test, test_points):.4f}")


if __name__ == "__main__":
    main()
