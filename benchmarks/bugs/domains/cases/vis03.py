import torch
import torch.nn as nn
import torch.nn.functional as F


def textures(n, seed):
    """Gratings with different orientation and frequency, camera-like offset and gain."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (n,), generator=g)
    ang = (y % 3).float() * 3.14159 / 3 + 0.15 * torch.randn(n, generator=g)
    freq = torch.where(y < 3, 0.6, 1.1) + 0.05 * torch.randn(n, generator=g)
    t = torch.arange(24).float()
    yy, xx = torch.meshgrid(t, t, indexing="ij")
    ph = torch.rand(n, generator=g) * 6.28
    arg = freq[:, None, None] * (xx * ang.cos()[:, None, None] + yy * ang.sin()[:, None, None]) + ph[:, None, None]
    img = torch.stack([arg.sin(), 0.5 * arg.cos()], 1) + 0.5 * torch.randn(n, 2, 24, 24, generator=g)
    return 0.5 + 0.25 * img, y


class ConvBN(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(o, eps=1e-3, momentum=0.001)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class SmallNet(nn.Module):
    def __init__(self, n_cls=6):
        super().__init__()
        self.stem = ConvBN(2, 16)
        self.stage1 = nn.Sequential(ConvBN(16, 24, 2), ConvBN(24, 24))
        self.stage2 = nn.Sequential(ConvBN(24, 32, 2), ConvBN(32, 32))
        self.fc = nn.Linear(32, n_cls)

    def forward(self, x):
        x = self.stage2(self.stage1(self.stem(x)))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def evaluate(model, x, y):
    model.eval()
    acc = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return acc


def main():
    torch.manual_seed(2)
    x, y = textures(1280, 1)
    xv, yv = textures(300, 2)
    model = SmallNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    epochs, bs = 5, 32
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=epochs * (len(x) // bs))
    for epoch in range(epochs):
        correct = 0
        for b in torch.randperm(len(x)).split(bs):
            out = model(x[b])
            loss = F.cross_entropy(out, y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            correct += (out.argmax(1) == y[b]).sum().item()
        print(f"epoch {epoch} train acc {correct / len(x):.3f} val acc {evaluate(model, xv, yv):.3f}")
    return evaluate(model, xv, yv)


if __name__ == "__main__":
    print(main())
