import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)
d = load_digits()
X = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(d.target)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 24, 3, padding=1), nn.Conv2d(24, 48, 3, padding=1)
        self.f1, self.f2 = nn.Linear(48 * 4, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.f2(F.relu(self.f1(x.flatten(1))))


def fit(net, opt, x, t, epochs, xv, tv, tag):
    for ep in range(epochs):
        net.train()
        tot = 0
        for b in torch.randperm(len(x)).split(32):
            loss = F.cross_entropy(net(x[b]), t[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += loss.item() * len(b) / len(x)
        net.eval()
        with torch.no_grad():
            acc = (net(xv).argmax(1) == tv).float().mean().item()
        print(f"{tag} epoch {ep} loss {tot:.4f} acc {acc:.4f}")
    return acc


shift = torch.roll(X, 1, 3) * 0.8 + 0.1
net = CNN()
fit(net, torch.optim.Adam(net.parameters(), 2e-3), X[:1000], y[:1000], 5, X[1400:], y[1400:], "source")
with torch.no_grad():
    before = (net(shift[1400:]).argmax(1) == y[1400:]).float().mean().item()
print("target acc before", round(before, 4))
opt = torch.optim.AdamW(net.parameters(), lr=3e-5, weight_decay=0.0)
acc = fit(net, opt, shift[400:1400], y[400:1400], 8, shift[1400:], y[1400:], "target")
print("final target acc", round(acc, 4))
