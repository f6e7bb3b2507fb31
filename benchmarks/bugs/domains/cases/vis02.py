"""Transfer: pretrain a small CNN on four shapes, freeze it (batch norm kept in eval), train only a head on a new task."""
import torch
import torch.nn as nn
import torch.nn.functional as F

S = 20


def shapes(n, g, task):
    kind = torch.randint(4, (n,), generator=g)
    cx = torch.randint(6, S - 6, (n,), generator=g)
    cy = torch.randint(6, S - 6, (n,), generator=g)
    r = torch.randint(3, 6, (n,), generator=g).float()
    yy, xx = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    dx, dy = (xx[None] - cx[:, None, None]).float(), (yy[None] - cy[:, None, None]).float()
    R = r[:, None, None]
    options = torch.stack([(dx ** 2 + dy ** 2 < R ** 2), (dx.abs().maximum(dy.abs()) < R * 0.9),
                           ((dx.abs() < 1.5) | (dy.abs() < 1.5)) & (dx.abs().maximum(dy.abs()) < R),
                           ((dx - dy).abs() < 2) & (dx.abs() < R)], 1).float()
    img = options[torch.arange(n), kind] + 0.12 * torch.randn(n, S, S, generator=g)
    y = kind if task == "kind" else ((kind == 0) | (kind == 3)).long()
    return img.unsqueeze(1), y


class Backbone(nn.Sequential):
    def __init__(self):
        layers, c = [], 1
        for o in (12, 24, 24):
            layers += [nn.Conv2d(c, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]
            c = o
        super().__init__(*layers, nn.Flatten())


class Transfer(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(24 * 4, 2)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)


def main():
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(1)
    backbone = Backbone()
    pre = nn.Sequential(backbone, nn.Linear(96, 4))
    opt = torch.optim.SGD(pre.parameters(), lr=0.05, momentum=0.9)
    for i in range(130):
        x, y = shapes(32, g, "kind")
        loss = F.cross_entropy(pre(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("pretraining loss", loss.item())
    model = Transfer(backbone.requires_grad_(False)).train()
    opt = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for i in range(160):
        x, y = shapes(32, g, "new")
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("head loss", loss.item())
    model.eval()
    x, y = shapes(400, g, "new")
    with torch.no_grad():
        return (model(x).argmax(-1) == y).float().mean().item()


if __name__ == "__main__":
    print(main())
