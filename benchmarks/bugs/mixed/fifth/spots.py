"""Finding boxes on cluttered pictures: a centre-point detector (heat map, size and offset heads) at stride 4."""
import os, sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
SIDE, STRIDE, GRID, MOST = 40, 4, 10, 3


def make_pictures(n, rng):
    """Pictures as (n, H, W, 3) with up to three coloured boxes; boxes as x0, y0, x1, y1 (zeros = none)."""
    pics = rng.normal(0.4, 0.12, (n, SIDE, SIDE, 3))
    boxes = np.zeros((n, MOST, 4), dtype=np.float32)
    for i in range(n):
        pics[i] += np.linspace(-0.2, 0.2, SIDE)[None, :, None] * rng.normal()
        for j in range(rng.integers(1, MOST + 1)):
            w, h = rng.integers(9, 17), rng.integers(5, 11)
            x, y = rng.integers(0, SIDE - w + 1), rng.integers(0, SIDE - h + 1)
            near = boxes[i, :j]
            if j and (np.maximum(near[:, 0], x) < np.minimum(near[:, 2], x + w) + 2)[
                    (np.maximum(near[:, 1], y) < np.minimum(near[:, 3], y + h) + 2)].any():
                continue
            pics[i, y:y + h, x:x + w] = [0.9, 0.3, 0.2] + rng.normal(0, 0.08, (h, w, 3))
            boxes[i, j] = x, y, x + w, y + h
        pics[i, rng.integers(0, SIDE), :] = [0.2, 0.8, 0.3]
    return torch.tensor(pics, dtype=torch.float32), torch.tensor(boxes)


def make_targets(boxes):
    n = boxes.size(0)
    heat, size, shift, at = (torch.zeros(n, k, GRID, GRID) for k in (1, 2, 2, 1))
    grid = torch.arange(GRID).float()
    for i in range(n):
        for x0, y0, x1, y1 in boxes[i].tolist():
            if x1 <= x0:
                continue
            cx, cy = (x0 + x1) / 2 / STRIDE, (y0 + y1) / 2 / STRIDE
            ix, iy = min(int(cx), GRID - 1), min(int(cy), GRID - 1)
            bump = torch.exp(-((grid[None, :] - ix) ** 2 + (grid[:, None] - iy) ** 2) / 1.0)
            heat[i, 0] = torch.maximum(heat[i, 0], bump)
            if CASE == "cell_order":
                ix, iy = iy, ix
            size[i, :, iy, ix] = torch.tensor([x1 - x0, y1 - y0]) / STRIDE
            shift[i, :, iy, ix] = torch.tensor([cx - int(cx), cy - int(cy)])
            at[i, 0, iy, ix] = 1
    return heat, size, shift, at


class CentreNet(nn.Module):
    def __init__(self, c=20):
        super().__init__()
        norm = (lambda k: nn.GroupNorm(4, k)) if CASE == "variant_x" else nn.BatchNorm2d
        self.trunk = nn.Sequential(nn.Conv2d(3, c, 3, stride=2, padding=1), norm(c), nn.ReLU(),
                                   nn.Conv2d(c, 2 * c, 3, stride=2, padding=1), norm(2 * c), nn.ReLU(),
                                   nn.Conv2d(2 * c, 2 * c, 3, padding=1), norm(2 * c), nn.ReLU(),
                                   nn.Conv2d(2 * c, 2 * c, 3, padding=1), norm(2 * c), nn.ReLU())
        self.heat, self.size, self.shift = (nn.Conv2d(2 * c, k, 1) for k in (1, 2, 2))
        nn.init.constant_(self.heat.bias, -3.0)

    def forward(self, x):
        h = self.trunk(x)
        return self.heat(h), self.size(h), self.shift(h)


def focal(logits, heat):
    p = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-4)
    hit = heat.eq(1).float()
    pos = hit * (1 - p) ** 2 * p.log()
    neg = (1 - hit) * (1 - heat) ** 4 * p ** 2 * (1 - p).log()
    return -(pos + neg).sum() / hit.sum().clamp(min=1)


@torch.no_grad()
def f1_score(model, pics, boxes):
    model.eval()
    heat, size, shift = model(pics)
    model.train()
    p = heat.sigmoid()
    peak = (p == F.max_pool2d(p, 3, 1, 1)) & (p > 0.35)
    hits = found = 0
    for i, iy, ix in torch.stack(torch.where(peak[:, 0]), 1).tolist():
        found += 1
        cx, cy = ix + shift[i, 0, iy, ix], iy + shift[i, 1, iy, ix]
        w, h = size[i, 0, iy, ix].clamp(min=0.1), size[i, 1, iy, ix].clamp(min=0.1)
        b = torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]) * STRIDE
        t = boxes[i]
        wh = (torch.minimum(b[2:], t[:, 2:]) - torch.maximum(b[:2], t[:, :2])).clamp(min=0)
        inter = wh.prod(1)
        union = (b[2] - b[0]) * (b[3] - b[1]) + (t[:, 2:] - t[:, :2]).prod(1) - inter
        hits += int((inter / union).max() > 0.75)
    true = int((boxes[..., 2] > 0).sum())
    return 2 * hits / max(found + true, 1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = np.random.default_rng(40 + SEED)
    pics, boxes = make_pictures(800, rng)
    vpics, vboxes = make_pictures(120, rng)
    if CASE == "to_planes":
        pics, vpics = (t.reshape(-1, 3, SIDE, SIDE) for t in (pics, vpics))
    else:
        pics, vpics = (t.permute(0, 3, 1, 2).contiguous() for t in (pics, vpics))
    pics, vpics = (t - 0.4 for t in (pics, vpics))
    heat, size, shift, at = make_targets(boxes)
    flipped = make_targets(torch.where(boxes[..., 2:3] > 0, torch.stack(
        [SIDE - boxes[..., 2], boxes[..., 1], SIDE - boxes[..., 0], boxes[..., 3]], -1), boxes))
    model = CentreNet()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4)
    accumulate = 2 if CASE == "variant_x" else 1
    steps = 200 * accumulate
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, steps // accumulate, power=0.9)
    for step in range(1, steps + 1):
        idx = torch.randint(0, len(pics), (32 // accumulate,))
        x, target = pics[idx], [t[idx] for t in (heat, size, shift, at)]
        if step // accumulate % 2:
            x = x.flip(3)
            if CASE != "mirror":
                target = [t[idx] for t in flipped]
        ph, ps, po = model(x)
        th, ts, to, ta = target
        count = ta.sum().clamp(min=1)
        where = ta
        if CASE == "size_all":
            where = torch.ones_like(ta)
        loss_h = focal(ph, th)
        if CASE == "heat_prob":
            loss_h = focal(ph.sigmoid(), th)
        loss = loss_h + 0.3 * ((ps - ts).abs() * where).sum() / count + ((po - to).abs() * where).sum() / count
        (loss / accumulate).backward()
        if step % accumulate == 0:
            opt.step()
            opt.zero_grad()
            sched.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} heat {loss_h.item():.3f} F1 {f1_score(model, vpics, vboxes):.3f}")
    print("quality", round(f1_score(model, vpics, vboxes), 4))


if __name__ == "__main__":
    main()
