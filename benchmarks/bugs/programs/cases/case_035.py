import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(1)
torch.set_num_threads(1)
d = load_digits()
x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(d.target)
old, new = y < 7, y >= 7


class Net(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(128, k)

    def forward(self, x):
        return self.head(self.features(x))


net = Net(7)
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
xo, yo = x[old], y[old]
for ep in range(5):
    net.train()
    for b in torch.randperm(len(xo)).split(64):
        loss = F.cross_entropy(net(xo[b]), yo[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("source epoch", ep, "loss", round(loss.item(), 4))

net.head = nn.Linear(128, 3)
for p in net.features.parameters():
    p.requires_grad = False
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=5e-3)
xn, yn = x[new], y[new] - 7
for ep in range(20):
    net.train()
    net.features.eval()
    for b in torch.randperm(400).split(40):
        with torch.no_grad():
            f = net.features(xn[b])
        loss = F.cross_entropy(net.head(f), yn[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if ep % 4 == 3:
        net.eval()
        with torch.no_grad():
            acc = (net(xn[400:]).argmax(1) == yn[400:]).float().mean().item()
        print("target epoch", ep, "loss", round(loss.item(), 4), "acc", round(acc, 4))
print("final acc", round(acc, 4))
