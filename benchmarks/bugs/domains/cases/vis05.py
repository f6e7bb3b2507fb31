"""Single-object detector: class logits plus box regression."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class TrainConfig:
    image: int = 64
    classes: int = 5
    batch: int = 32
    steps: int = 170
    lr: float = 0.01
    momentum: float = 0.9
    box_weight: float = 1.0


def scenes(n, cfg, g):
    S = cfg.image
    cls = torch.randint(cfg.classes, (n,), generator=g)
    wh = torch.randint(14, 30, (n, 2), generator=g)
    xy = (torch.rand(n, 2, generator=g) * (S - wh)).long()
    t = torch.arange(S)
    inx = (t[None] >= xy[:, :1]) & (t[None] < xy[:, :1] + wh[:, :1])
    iny = (t[None] >= xy[:, 1:]) & (t[None] < xy[:, 1:] + wh[:, 1:])
    box = (iny[:, :, None] & inx[:, None, :]).float()
    tt = t.float()
    stripes = torch.stack([torch.ones(S, S), ((tt[None] // 2) % 2).expand(S, S), ((tt[:, None] // 2) % 2).expand(S, S),
                           ((tt[None] + tt[:, None]) // 2) % 2, ((tt[None] // 4) % 2).expand(S, S)])
    img = box * (stripes[cls] * 1.4 - 0.2) + 0.2 * torch.randn(n, S, S, generator=g)
    target = torch.cat([xy + wh / 2, wh.float()], 1)
    return img.unsqueeze(1), cls, target


class Detector(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        c = [1, 12, 16, 24, 24]
        self.backbone = nn.Sequential(*[m for i, o in zip(c, c[1:]) for m in (
            nn.Conv2d(i, o, 3, stride=2, padding=1), nn.GroupNorm(4, o), nn.ReLU())])
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(24 * 16, 64), nn.ReLU())
        self.cls_head = nn.Linear(64, cfg.classes)
        self.box_head = nn.Linear(64, 4)

    def forward(self, x):
        h = self.neck(self.backbone(x))
        return self.cls_head(h), self.box_head(h)


def main():
    cfg = TrainConfig()
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(4)
    net = Detector(cfg)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=cfg.momentum)
    for step in range(cfg.steps):
        img, cls, box = scenes(cfg.batch, cfg, g)
        logits, pred = net(img)
        cls_loss = F.cross_entropy(logits, cls)
        box_loss = F.mse_loss(pred, box)
        loss = cls_loss + cfg.box_weight * box_loss
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.3f} cls {cls_loss.item():.3f}")
    net.eval()
    with torch.no_grad():
        img, cls, _ = scenes(300, cfg, g)
        return (net(img)[0].argmax(1) == cls).float().mean().item()


if __name__ == "__main__":
    print(main())
