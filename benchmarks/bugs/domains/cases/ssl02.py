"""SimSiam on synthetic sensor windows, evaluated with a k-nearest-neighbour probe."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Sensors:
    def __init__(self, classes=5, dim=24, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(classes, 8, generator=g) * 1.2
        self.mix = torch.randn(8, dim, generator=g) / 8 ** 0.5
        self.nuis = torch.randn(6, dim, generator=g) / 6 ** 0.5
        self.g, self.classes, self.dim = g, classes, dim

    def draw(self, n):
        y = torch.randint(self.classes, (n,), generator=self.g)
        return (self.centres[y] + 0.5 * torch.randn(n, 8, generator=self.g)) @ self.mix, y

    def augment(self, x):
        bg = torch.randn(len(x), 6, generator=self.g) @ self.nuis
        return x + 1.3 * bg + 0.15 * torch.randn(x.shape, generator=self.g)


class SimSiam(nn.Module):
    def __init__(self, dim=24, hid=64, out=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, hid), nn.BatchNorm1d(hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, out))
        self.predictor = nn.Sequential(nn.Linear(out, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out))

    def forward(self, x1, x2):
        z1 = self.projector(self.backbone(x1))
        z2 = self.projector(self.backbone(x2))
        return self.predictor(z1), self.predictor(z2), z1, z2


def D(p, z):
    return -F.cosine_similarity(p, z, dim=-1).mean()


@torch.no_grad()
def probe(model, data):
    model.eval()
    xa, ya = data.draw(600)
    xb, yb = data.draw(300)
    ha = F.normalize(model.projector(model.backbone(data.augment(xa))), dim=-1)
    hb = F.normalize(model.projector(model.backbone(data.augment(xb))), dim=-1)
    nn_idx = (hb @ ha.T).topk(9).indices
    return (ya[nn_idx].mode(-1).values == yb).float().mean().item()


def main():
    torch.manual_seed(10)
    data = Sensors()
    model = SimSiam()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 250)
    for step in range(250):
        x, _ = data.draw(128)
        p1, p2, z1, z2 = model(data.augment(x), data.augment(x))
        loss = 0.5 * D(p1, z2) + 0.5 * D(p2, z1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return probe(model, data)


if __name__ == "__main__":
    print(main())
