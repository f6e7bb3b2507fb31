import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(10)
torch.set_num_threads(1)


class ResBlock(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.short = nn.Conv2d(i, o, 1, s, bias=False)

    def forward(self, x):
        y = F.relu(self.b1(self.c1(x)))
        return F.relu(self.b2(self.c2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.b1, self.b2, self.b3 = ResBlock(16, 16, 1), ResBlock(16, 32, 2), ResBlock(32, 48, 2)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        x = self.b3(self.b2(self.b1(self.stem(x))))
        return self.fc(self.drop(x.mean((2, 3))))


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        out = model(x)
    return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


d = load_digits()
x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) * 16
y = torch.tensor(d.target)
xtr, ytr, xte, yte = x[:1400], y[:1400], x[1400:], y[1400:]
model = ResNet()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model.train()
print("before training", evaluate(model, xte, yte))
for epoch in range(5):
    model.train()
    for b in torch.randperm(1400).split(64):
        loss = F.cross_entropy(model(xtr[b]), ytr[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    vl, va = evaluate(model, xte, yte)
    print(f"epoch {epoch} loss {loss.item():.4f} val loss {vl:.4f} val acc {va:.4f}")
print("final val acc", round(va, 4))
