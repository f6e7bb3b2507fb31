import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Block(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(ch)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    def __init__(self, ch=20, n=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU())
        self.blocks = nn.Sequential(*[Block(ch) for _ in range(n)])
        self.fc = nn.Linear(ch, 10)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    xtr, ytr, xte, yte = x[:1400], y[:1400], x[1400:], y[1400:]
    model = ResNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    epochs, bs = 8, 64
    total = epochs * math.ceil(len(xtr) / bs)
    warm = total // 10
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: s / warm if s < warm else 0.5 * (1 + math.cos(math.pi * (s - warm) / (total - warm))))
    for ep in range(epochs):
        model.train()
        for b in torch.randperm(len(xtr)).split(bs):
            loss = F.cross_entropy(model(xtr[b]), ytr[b], label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        model.eval()
        with torch.no_grad():
            acc = (model(xte).argmax(1) == yte).float().mean().item()
        print(f"epoch {ep} lr {sched.get_last_lr()[0]:.4f} loss {loss.item():.4f} acc {acc:.4f}")
    print("final acc", round(acc, 4))


main()
