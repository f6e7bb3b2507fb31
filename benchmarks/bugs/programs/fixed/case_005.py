import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)
np.random.seed(0)
torch.set_num_threads(1)

COLORS = np.array([[1, 0.2, 0.2], [0.2, 1, 0.2], [0.2, 0.2, 1]], dtype=np.float32)


def render(n, size=20):
    """coloured bars: the class is (orientation, colour)"""
    imgs = np.random.rand(n, size, size, 3).astype(np.float32) * 0.8
    labels = np.zeros(n, dtype=np.int64)
    for i in range(n):
        o, c = np.random.randint(4), np.random.randint(3)
        labels[i] = o * 3 + c
        cx, cy = np.random.randint(6, size - 6, 2)
        for t in range(-5, 6):
            dx, dy = [(1, 0), (0, 1), (1, 1), (1, -1)][o]
            imgs[i, cy + t * dy, cx + t * dx] = COLORS[c]
    return imgs, labels


def to_tensor(imgs):
    n, h, w, c = imgs.shape
    t = torch.from_numpy(imgs)
    t = t.permute(0, 3, 1, 2)
    return (t - 0.4) / 0.25


net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 12),
)
xi, yi = render(1000)
xv, yv = render(300)
X, Y = to_tensor(xi), torch.from_numpy(yi)
XV, YV = to_tensor(xv), torch.from_numpy(yv)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
crit = nn.CrossEntropyLoss()
for epoch in range(10):
    net.train()
    for b in torch.randperm(len(X)).split(50):
        loss = crit(net(X[b]), Y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        acc = (net(XV).argmax(1) == YV).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, val acc {acc:.4f}")
print(f"final val acc {acc:.4f}")
